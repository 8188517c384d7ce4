"""DCViT: against the definition, Transformers' ViT and itself in other implementations, sizes, masks and formats."""

import math

import numpy as np
import pytest
import torch
from helpers import trainer_of
from torch.func import functional_call, grad, vmap
from transformers import AutoModel, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from dcformer import ComposeTrace, DCViTForImageClassification, DCViTModel, parameter_groups
from dcformer.attention_dcformer import eager_attention
from dcformer.vision import sincos_positions

PLAIN = {f"compose_{name}": False for name in ("pre", "post", "query", "key", "static")} | {"qk_norm": None}
LIKE_VIT = PLAIN | {"pooling": "cls", "position_embedding_type": "learned", "representation_size": None}


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns", "size"), [(14, 14, 384), (3, 5, 32), (1, 2, 8)])
def test_positions_are_the_formulas(rows, columns, size):
    table = sincos_positions(rows, columns, size)
    assert table.shape == (rows * columns, size) and table.dtype == torch.float32
    quarter = size // 4
    for y in range(rows):
        for x in range(columns):
            for part, (function, at) in enumerate(((math.sin, x), (math.cos, x), (math.sin, y), (math.cos, y))):
                for i in range(quarter):
                    expected = function(at * 10000 ** (-i / (quarter - 1)))
                    found = table[y * columns + x, part * quarter + i].item()
                    assert found == pytest.approx(expected, rel=0, abs=2**-24)  # half a unit of float32 below 1


def test_positions_are_not_trained_nor_stored(make_model):
    model = make_model()
    assert not any("position" in name for name in [*model.state_dict(), *dict(model.named_parameters())])
    assert torch.equal(model.dcvit.embeddings.position_embeddings[0], sincos_positions(4, 4, 32))


def test_positions_after_a_state_dict(make_model, images):
    """In a model that was made without memory, which no state dict fills for them."""
    model = make_model().eval()
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    empty.to_empty(device="cpu")
    empty.dcvit.embeddings.position_embeddings.fill_(float("nan"))  # as memory may be
    empty.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(empty(images).logits, model(images).logits)


def test_attention_is_the_definition_without_causality(make_model, images):
    """One layer's attention in float64: the package's own attention with the weights of its own generators."""
    model = make_model().double()
    attention = model.dcvit.layers[0].attention
    states = torch.randn(2, 7, 32, dtype=torch.float64)
    output, weights = attention(states)

    def heads(projection, norm):
        projected = projection(states).unflatten(-1, (4, 8))  # [B, T, H, D]
        if norm is not None:
            centered = projected - projected.mean(-1, keepdim=True)
            projected = centered / (projected.var(-1, correction=0, keepdim=True) + 1e-6).sqrt() * norm.weight
        return projected.transpose(1, 2)

    query, key = heads(attention.q_proj, attention.q_norm), heads(attention.k_proj, attention.k_norm)
    generated, statics = attention.compose(states)
    stages = {
        stage: attention.compose.stage_weights(generated[stage, "query"], generated[stage, "key"], statics[stage])
        for stage in ("pre", "post")
    }
    module = type("Module", (), {"training": False})()
    expected, maps = eager_attention(
        module, query, key, heads(attention.v_proj, None), None, 8**-0.5, is_causal=False, **stages
    )
    # rounding of float64 over some dozen operations
    torch.testing.assert_close(weights, maps, rtol=0, atol=1e-12)
    torch.testing.assert_close(output, attention.o_proj(expected.flatten(2)), rtol=0, atol=1e-12)
    assert (weights.triu(1).abs() > 1e-6).any()  # queries see later keys


def test_initial_values_are_the_forks():
    from dcformer import DCViTConfig

    config = DCViTConfig(image_size=32, num_hidden_layers=1, num_labels=4, pooling="cls", compose_gate_init=0.005)
    model = DCViTForImageClassification(config)
    named, e, m = dict(model.named_parameters()), 384, 6
    compose = "dcvit.layers.0.attention.compose."
    expected = {
        "dcvit.layers.0.attention.q_proj.weight": math.sqrt(2 / (e + e)),
        "dcvit.layers.0.mlp.fc1.weight": math.sqrt(2 / (e + 4 * e)),
        "dcvit.embeddings.patch_embeddings.projection.weight": math.sqrt(1 / (3 * 16 * 16)),
        "dcvit.pooler.dense.weight": math.sqrt(1 / e),
        compose + "dw1_proj.weight": math.sqrt(2 / (e + 4 * m)),
        compose + "qkw": 0.01 * 2 / (m + 2) / math.sqrt(4 * m),
        compose + "gate_proj.weight": 0.005 * math.sqrt(2 / (e + m)),
        compose + "pre_static": 0.1 / math.sqrt(m),
    }
    for name, std in expected.items():
        count = named[name].numel()
        error = 4 / math.sqrt(2 * count)  # four standard errors of a standard deviation
        assert named[name].std().item() == pytest.approx(std, rel=error), name
    assert named["dcvit.layers.0.attention.q_proj.weight"].abs().max() <= math.sqrt(6 / (2 * e))  # uniform
    zero = [name for name, p in named.items() if not p.any()]
    assert {"classifier.weight", "classifier.bias", "dcvit.embeddings.cls_token"} <= set(zero)
    assert all(name.endswith("bias") for name in set(zero) - {"classifier.weight", "dcvit.embeddings.cls_token"})


# --- Transformers' ViT ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked", None])
def test_plain_setting_is_transformers_vit(make_model, images, implementation):
    """Learned positions, class token, nothing composed: its weights load by their names and give its logits."""
    ours = make_model(implementation, **LIKE_VIT)
    names = ("image_size", "patch_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_labels", "layer_norm_eps", "hidden_act")
    fields = {name: getattr(ours.config, name) for name in names}
    theirs = ViTForImageClassification(ViTConfig(**fields, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours.load_state_dict({name.replace("vit.", "dcvit.", 1): t for name, t in theirs.state_dict().items()})
    # in float64 one formula; in float32 they differ by rounding alone, for which theirs is the yardstick
    exact = theirs.double()(images.double()).logits
    double = ours.double()(images.double()).logits
    # their softmax is in float32 in a float64 model, too: 2^-24 of weights of at most 1, a few layers on
    torch.testing.assert_close(double, exact, rtol=0, atol=64 * 2**-24 * exact.abs().max().item())
    single, reference = ours.float()(images).logits, theirs.float()(images).logits
    band = 2 * (reference - exact).abs().max().item() + 8 * 2**-24 * exact.abs().max().item()
    assert (single - exact).abs().max() <= band
    assert exact.std() > 0.1


# --- implementations, sizes, masks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"pooling": "cls", "compose_groups": 2}, {"qk_norm": None, "compose_key": False}]
)
def test_implementations_agree_with_every_gradient(make_model, fields):
    """20 tokens and more: beyond the few that the chunked implementation treats as eager does.

    In float64 the two are the same to rounding. In float32 chunked attention may be eight times as far off as eager
    attention is for the gradient where that is worst: over 60 images the ratio went up to 3.3, as either may be lucky.
    """
    images = torch.randn(2, 3, 24, 16)
    results = {}
    for implementation in ("eager", "dcformer_chunked"):
        for dtype in (torch.float64, torch.float32):
            model = make_model(implementation, image_size=(24, 16), **fields).to(dtype)
            loss = model(images.to(dtype), labels=torch.tensor([1, 4])).loss
            loss.backward()
            results[implementation, dtype] = {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}

    exact = results["eager", torch.float64]
    if "compose_key" in fields:  # what all keys share changes nothing: the gradient is 0
        for layer in range(2):
            assert exact.pop(f"dcvit.layers.{layer}.attention.k_proj.bias").abs().max() < 1e-12
    largest = {name: wide.abs().max().item() for name, wide in exact.items()}
    assert min(largest.values()) > 1e-6

    def error(implementation: str, dtype: torch.dtype) -> float:
        found = results[implementation, dtype]
        return max((found[name] - wide).abs().max().item() / largest[name] for name, wide in exact.items())

    assert error("dcformer_chunked", torch.float64) < 1e-11
    assert error("dcformer_chunked", torch.float32) <= 8 * error("eager", torch.float32) < 1e-2


def test_larger_images_with_the_same_weights(make_model):
    """384 pixels after 224, in the small: positions of any grid are computed, and the weights are the same."""
    small, large = make_model(), make_model(image_size=(24, 32))
    large.load_state_dict(small.state_dict())
    images = torch.randn(2, 3, 24, 32)
    with pytest.raises(ValueError, match=r"images of 24x32 pixels.*16x16.*interpolate_pos_encoding=True"):
        small(images)
    assert torch.equal(small(images, interpolate_pos_encoding=True).logits, large(images).logits)


def test_384_pixels_after_224():
    from dcformer import DCViTConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = DCViTModel(DCViTConfig(**sizes)).eval()
    with torch.no_grad():
        states = model(torch.randn(1, 3, 384, 384), interpolate_pos_encoding=True).last_hidden_state
    assert states.shape == (1, 24 * 24, 16) and states.isfinite().all()
    assert torch.equal(model.embeddings.positions((24, 24))[0], sincos_positions(24, 24, 16))


def test_learned_positions_are_interpolated_as_transformers_does(make_model):
    model = make_model(**LIKE_VIT)
    theirs = ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, hidden_size=32, num_attention_heads=4,
                                                 num_hidden_layers=0, intermediate_size=40)).vit.embeddings  # fmt: skip
    embeddings = model.dcvit.embeddings
    theirs.load_state_dict(embeddings.state_dict())
    images = torch.randn(2, 3, 24, 32)
    expected = theirs(images, interpolate_pos_encoding=True)
    assert torch.equal(embeddings(images, interpolate_pos_encoding=True), expected)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_hidden_patches_do_not_matter(make_model, images, implementation):
    model = make_model(implementation)
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[1, 9:] = 0
    logits = model(images, attention_mask=mask).logits
    changed = images.clone()
    changed[1, :, 12:] = 9.0  # the last row of patches, 12 to 15
    torch.testing.assert_close(model(changed, attention_mask=mask).logits[1], logits[1], rtol=0, atol=1e-6)
    assert (model(changed).logits[1] - model(images).logits[1]).abs().max() > 1e-2
    # without anything hidden the mask changes nothing but rounding
    torch.testing.assert_close(model(images, attention_mask=torch.ones_like(mask)).logits, model(images).logits)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("tokens", [16, 24])
def test_a_row_that_sees_nothing_is_zero(make_model, implementation, tokens):
    """Attention gives zeros, before the output projection's bias; gradients are finite."""
    model = make_model(implementation)
    attention, states = model.dcvit.layers[0].attention, torch.randn(2, tokens, 32, requires_grad=True)
    mask = torch.ones(2, 1, tokens, tokens, dtype=torch.bool)
    mask[1, :, 3] = False
    output, _ = attention(states, mask)
    assert torch.equal(output[1, 3], attention.o_proj.bias) and not torch.equal(output[1, 4], attention.o_proj.bias)
    output.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in [states, *attention.parameters()])


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_an_image_that_is_hidden_altogether(make_model, images, implementation):
    model = make_model(implementation)
    mask = torch.ones(3, 16, dtype=torch.long)
    mask[2] = 0
    outputs = model.dcvit(images, attention_mask=mask)
    assert torch.equal(outputs.pooler_output[2], torch.tanh(model.dcvit.pooler.dense.bias))
    loss = model(images, attention_mask=mask, labels=torch.tensor([0, 1, 2])).loss
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


# --- as a model of Transformers ---------------------------------------------------------------------------------------


def test_saved_and_loaded(make_model, images, tmp_path):
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(loaded) is DCViTForImageClassification and not loaded.training
    assert torch.equal(loaded(images).logits, model(images).logits)
    base = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(base) is DCViTModel
    assert torch.equal(base(images).pooler_output, model.dcvit(images).pooler_output)


def test_a_damaged_file_is_named(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(OSError, match=r"model\.safetensors is damaged or truncated .*: copy or download it again"):
        AutoModelForImageClassification.from_pretrained(tmp_path)


def test_fewer_layers(make_model, images, tmp_path):
    """As many run as the configuration says, as they will when it is loaded; a missing one is refused."""
    model = make_model()
    both = model(images).logits
    model.config.num_hidden_layers = 1
    first = model(images).logits
    model.save_pretrained(tmp_path / "first")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "first", attn_implementation="eager")
    assert torch.equal(loaded(images).logits, first) and not torch.equal(first, both)
    model.config.num_hidden_layers = -1
    with pytest.raises(ValueError, match="num_hidden_layers=-1 must not be negative"):
        model(images)
    model.config.num_hidden_layers = 2
    del model.dcvit.layers[0]
    with pytest.raises(ValueError, match=r"has 1 layers and config\.num_hidden_layers=2.*num_hidden_layers = 1"):
        model.save_pretrained(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_a_trace_is_not_filled_twice(make_model, images):
    model = make_model().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="compose_trace with gradient checkpointing"):
        model(images, compose_trace=ComposeTrace())
    with pytest.raises(ValueError, match="compose_trace is of type dict"):
        model.eval()(images, compose_trace={})


def test_other_classes_are_learned_anew(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path, num_labels=9, ignore_mismatched_sizes=True)
    assert loaded.classifier.weight.shape == (9, 32) and not loaded.classifier.weight.any()


def test_maps_and_hidden_states(make_model, images):
    model = make_model()
    outputs = model(images, output_attentions=True, output_hidden_states=True)
    assert [maps.shape for maps in outputs.attentions] == [(3, 4, 16, 16)] * 2
    assert [states.shape for states in outputs.hidden_states] == [(3, 16, 32)] * 3
    sums = outputs.attentions[0].sum(-1)
    assert (sums - 1).abs().max() > 0.1  # composed: rows need not sum to 1
    trace = ComposeTrace()
    model(images, compose_trace=trace)
    assert torch.equal(trace.layers[1].composed_weights, outputs.attentions[1]) and len(trace.layers) == 2
    torch.testing.assert_close(trace.layers[0].weights.sum(-1), torch.ones(3, 4, 16))


def test_attention_implementations_are_named(make_model):
    model = make_model(None)
    assert model.config._attn_implementation == "dcformer_default"
    with pytest.raises(ValueError, match=r"'sdpa' cannot compose attention heads.*'eager', 'dcformer_chunked'"):
        model.set_attn_implementation("sdpa")
    model.set_attn_implementation("dcformer_chunked")
    assert model.dcvit.config._attn_implementation == "dcformer_chunked"


@pytest.mark.parametrize("name", ["sdpa", "flex_attention", "flash_attention_2", "nonsense"])
def test_attention_of_the_library_is_refused_without_composition(make_model, name):
    """By a message that recommends none of it."""
    model = make_model(None, **PLAIN)
    for call in (lambda: make_model(name, **PLAIN), lambda: model.set_attn_implementation(name)):
        with pytest.raises(ValueError, match=rf"'{name}' is not .*: use one of \('eager', [^)]*\), or leave") as error:
            call()
        assert "sdpa" not in str(error.value).partition("use one of")[2]
    assert model.config._attn_implementation == "dcformer_default"


def test_gradient_checkpointing_changes_nothing(make_model, images):
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(images, labels=torch.tensor([0, 1, 2])).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_every_generator_learns(make_model, images):
    """From the initial values, where the head is zero: after one step everything has a gradient."""
    from dcformer import DCViTConfig

    torch.manual_seed(0)
    model = DCViTForImageClassification(DCViTConfig(**{name: getattr(make_model().config, name) for name in (
        "image_size", "patch_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_labels")}))  # fmt: skip
    labels, optimizer = torch.tensor([0, 1, 2]), torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(images, labels=labels).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(5), rel=1e-6)  # a head of zeros knows nothing
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "k_proj.bias" not in name)


def test_mixed_precision_is_close_to_full(make_model, images):
    model = make_model()
    full = model(images).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = model(images).logits
    half = model.to(torch.bfloat16)(images).logits.float()
    size = full.abs().max()
    # 2^-8 for each product, norm and sum on the way, some fifty of them in two layers, added as if independent;
    # three standard deviations
    for logits in (mixed, half):
        assert 0 < (logits - full).abs().max() < 2**-8 * math.sqrt(50) * 3 * size


@pytest.mark.parametrize("positions", ["learned", "sincos2d"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_loaded_in_half_precision(make_model, images, positions, dtype, tmp_path):
    """As with `to`: the library casts parameters, and buffers it does not."""
    model = make_model(position_embedding_type=positions)
    model.save_pretrained(tmp_path)
    loaded = DCViTForImageClassification.from_pretrained(tmp_path, dtype=dtype, attn_implementation="eager")
    expected = model.to(dtype)(images).logits
    assert torch.equal(loaded(images).logits, expected) and expected.dtype == dtype
    larger = torch.randn(1, 3, 24, 16)
    assert loaded(larger, interpolate_pos_encoding=True).logits.dtype == dtype


def test_groups_for_optimizers(make_model):
    model = make_model()
    groups = parameter_groups(model, lr=1e-3, ratios="initial")
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    ratio = {group["name"]: group["lr"] / 1e-3 for group in groups}
    assert ratio["compose.qkw"] < 0.05 and ratio["matrices"] == 1


def test_traced_as_one_graph(make_model):
    model, images = make_model("dcformer_chunked", image_size=24), torch.randn(2, 3, 24, 24)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images).logits, model(images).logits)


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 16, 16), r"\(2, 1, 16, 16\) do not fit num_channels=3"),
        ((3, 16, 16), r"\(3, 16, 16\) do not fit num_channels=3"),
        ((2, 3, 18, 16), "18x16 pixels cannot be cut into patches of 4x4"),
        ((2, 3, 20, 20), "20x20 pixels, but the model's image_size is 16x16"),
    ],
)
def test_images_that_do_not_fit(make_model, shape, message):
    with pytest.raises(ValueError, match=message):
        make_model()(torch.randn(shape))


def test_no_images(make_model):
    with pytest.raises(ValueError, match="Give pixel_values"):
        make_model()()


def test_masks_that_do_not_fit(make_model, images):
    with pytest.raises(ValueError, match=r"\(3, 15\) does not fit: expected \(3, 16\)"):
        make_model()(images, attention_mask=torch.ones(3, 15))
    with pytest.raises(ValueError, match=r"\(3, 16, 16\) does not fit: .* or one of \(batch, 1, tokens, tokens\)"):
        make_model()(images, attention_mask=torch.ones(3, 16, 16))


@pytest.mark.parametrize("wrong", [5, -1])
def test_labels_outside(make_model, images, wrong):
    with pytest.raises(ValueError, match=rf"labels hold \[{wrong}\], but num_labels=5: expected 0 to 4"):
        make_model()(images, labels=torch.tensor([0, wrong, 4]))
    ignored = make_model()(images, labels=torch.tensor([0, -100, 4])).loss
    kept = make_model()(images[[0, 2]], labels=torch.tensor([0, 4])).loss
    torch.testing.assert_close(ignored, kept)


def test_gradients_of_each_image(make_model, images):
    """`vmap(grad)` of the loss that labels give, beside one image at a time."""
    model = make_model(attn_implementation="eager").eval()
    labels = torch.tensor([0, 2, 4])
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, image, label):
        return functional_call(model, parameters, (image[None],), {"labels": label[None]}).loss

    together = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, images, labels)
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        for name, expected in grad(loss)(parameters, image, label).items():
            torch.testing.assert_close(together[name][row], expected)


def test_labels_of_other_problems(make_model, images):
    several = make_model(problem_type="multi_label_classification")
    assert several(images, labels=torch.ones(3, 5)).loss.isfinite()
    value = make_model(num_labels=1)
    assert np.isfinite(value(images, labels=torch.tensor([7.0, -3.0, 9.0])).loss.item())


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_accumulated_batches_are_one_batch(make_model, problem, is_named, tmp_path):
    """The library knows what kind of labels there are from the first of them, at the latest."""
    fields = {"num_labels": 1 if problem == "regression" else 3, "problem_type": problem if is_named else None}
    model = make_model(**fields).train()
    labels = torch.arange(8) % 3
    labels = (
        torch.eye(3)[labels] if problem.startswith("multi") else labels.float() if problem == "regression" else labels
    )
    pixels = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows = [{"pixel_values": i, "labels": j} for i, j in zip(pixels, labels, strict=True)]
    found = []
    for batch, number in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": number}
        trainer = trainer_of(model, rows, tmp_path, **sizes)
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
