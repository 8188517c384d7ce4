"""The models: registration, heads, switches, training features, and clear errors for bad input."""

import copy
import json
import logging
import math
import re
import subprocess
import sys
import warnings

import accelerate
import pytest
import torch
import transformers
from helpers import PLAIN, Logits, randomize, tiny_config, trainer_of
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import dcformer
from dcformer import ComposeTrace, DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig
from dcformer.analysis import num_compose_parameters, num_parameters
from dcformer.cache_dcformer import CACHE_NAME
from dcformer.modeling_dcformer import DCFormerDecoderLayer, DCFormerRMSNorm

SWITCHES = {
    "default": {},
    "plain": {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False},
    "talking-heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "static too": {"compose_static": True},
    "query-wise": {"compose_key": False},
    "key-wise": {"compose_query": False},
    "pre": {"compose_post": False},
    "post": {"compose_pre": False},
    "no gate": {"compose_gate": False},
    "gate only": {"compose_projection": False},
    "rank 1": {"compose_rank": 1},
    "rank 3": {"compose_rank": 3},
    "groups": {"compose_groups": 2},
    "erf": {"compose_act": "gelu"},
    "mha": {"num_key_value_heads": 4},
    "no qk-norm": {"qk_norm": False},
    "layernorm": {"norm_type": "layernorm"},
    "parallel": {"use_parallel_residual": True},
    "partial rotary": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "plain mlp": {"mlp_type": "plain", "hidden_act": "gelu"},
    "multi-gate": {"mlp_gates": 4},
    "LGLL": {"layer_pattern": "LGLL", "num_hidden_layers": 4},
    "tied": {"tie_word_embeddings": True},
}


def _tokens(batch=2, length=20):
    return torch.randint(0, 97, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)
def test_every_switch_trains_saves_and_counts(switches, tmp_path):
    config = tiny_config(**switches)
    model = randomize(DCFormerForCausalLM(config))
    assert sum(p.numel() for p in model.parameters()) == num_parameters(config)
    composition = sum(p.numel() for n, p in model.named_parameters() if ".compose." in n)
    assert composition == num_compose_parameters(config)

    ids = _tokens()
    out = model(ids, labels=ids)
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, out.logits)


@pytest.mark.parametrize("config_class", [DCFormerConfig, DCPythiaConfig])
@pytest.mark.parametrize(
    ("auto_class", "suffix"),
    [
        ("AutoModel", "Model"),
        ("AutoModelForCausalLM", "ForCausalLM"),
        ("AutoModelForSequenceClassification", "ForSequenceClassification"),
        ("AutoModelForTokenClassification", "ForTokenClassification"),
        ("AutoModelForQuestionAnswering", "ForQuestionAnswering"),
    ],
)
def test_auto_classes(config_class, auto_class, suffix, tmp_path):
    config = config_class(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    model = getattr(transformers, auto_class).from_config(config)
    prefix = {"dcformer": "DCFormer", "dcpythia": "DCPythia"}[config.model_type]
    assert type(model) is getattr(dcformer, prefix + suffix)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, auto_class).from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert type(AutoConfig.from_pretrained(tmp_path)) is config_class
    ids = _tokens(length=10)
    out, same = model.eval()(ids), again(ids)
    name = next(n for n in ("logits", "start_logits", "last_hidden_state") if n in out)
    assert torch.equal(out[name], same[name])
    if suffix == "ForSequenceClassification":
        assert out.logits.shape == (2, 2)
        assert model(ids, labels=torch.tensor([0, 1])).loss.isfinite()
    if suffix == "ForTokenClassification":
        assert out.logits.shape == (2, 10, 2)
    if suffix == "ForQuestionAnswering":
        assert out.start_logits.shape == out.end_logits.shape == (2, 10)


def test_multi_gate_mlp_by_its_formula():
    config = tiny_config(mlp_gates=4)
    mlp = dcformer.modeling_dcformer.DCFormerMLP(config).double()
    x = torch.randn(2, 3, 32, dtype=torch.float64)
    gates = torch.softmax(x @ mlp.multi_gate_proj.weight.T, -1)
    hidden = nn.functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    expected = torch.zeros(2, 3, 32, dtype=torch.float64)
    for group in range(4):
        part = slice(group * 16, (group + 1) * 16)
        expected += gates[..., group, None] * (hidden[..., part] @ mlp.down_proj.weight.T[part])
    torch.testing.assert_close(mlp(x), expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e-3], ids=["usual", "near the epsilon"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_type", ["rmsnorm", "layernorm"])
def test_norms_by_their_formula(norm_type, dtype, size):
    """With the configuration's epsilon, and in low precision rounded once, at the end."""
    config = tiny_config(norm_type=norm_type, norm_eps=3e-5, qk_norm_eps=2e-5)
    model = DCFormerForCausalLM(config).to(dtype).model
    layer = model.layers[0]
    norms = [(model.norm, 3e-5), (layer.input_layernorm, 3e-5), (layer.post_attention_layernorm, 3e-5)]
    norms += [(layer.self_attn.q_norm, 2e-5), (layer.self_attn.k_norm, 2e-5)]
    for norm, eps in norms:
        x = (size * torch.randn(200, norm.weight.shape[0])).to(dtype)
        exact = x.double()
        if hasattr(norm, "bias"):
            exact = exact - exact.mean(-1, keepdim=True)
        exact = exact / (exact.square().mean(-1, keepdim=True) + eps).sqrt()
        # one rounding, and before it those of some float32 operations on numbers of a row's size
        inner = 1e-13 if dtype == torch.float64 else 16 * torch.finfo(torch.float32).eps
        band = torch.finfo(dtype).eps / 2 * exact.abs() + inner * exact.abs().amax(-1, keepdim=True)
        assert ((norm(x).double() - exact).abs() <= band).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rms_norm_rounds_before_its_weight(dtype):
    """As Llama's does, for whose kernels and checkpoints this is the convention."""
    norm = DCFormerRMSNorm(64, 1e-5).to(dtype)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(200, 64).to(dtype)
    wide = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    rounded = (norm.weight.double() * wide.to(dtype).double()).to(dtype)
    at_once = (norm.weight.double() * wide).to(dtype)
    found = norm(x)
    assert (found == rounded).double().mean() > 0.99 > (found == at_once).double().mean()


LONG = torch.linspace(1, 9, 4).tolist()  # a factor for each of a head's frequencies


@pytest.mark.parametrize("length", [30, 50])  # longrope has other factors beyond the original length
@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_type": "default"}, 1.0),
        ({"rope_type": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": LONG},
         math.sqrt(1 + math.log(4) / math.log(32))),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, 1.0),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.375}, 1.0),  # of 8 channels, one pair
    ],
    ids=["default", "yarn", "longrope", "proportional", "proportional, odd"],
)  # fmt: skip
def test_rotary_embeddings_are_the_librarys_and_scaled(rope, scaling, length):
    """Scaled types lengthen queries and keys alike: the scaling is on cosines and sines."""
    rope = {"rope_theta": 1e4} | rope | ({} if scaling == 1 else {"original_max_position_embeddings": 32})
    config = tiny_config(rope_parameters=rope)
    x, positions = torch.zeros(1), torch.arange(length)[None]
    cos, sin = dcformer.modeling_dcformer.DCFormerRotaryEmbedding(config)(x, positions)
    expected = LlamaRotaryEmbedding(config)(x, positions)
    torch.testing.assert_close((cos, sin), expected, rtol=0, atol=1e-6)  # float32 angles of up to 50 radians
    assert cos.shape[-1] == config.rotary_dim
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, scaling**2))


@pytest.mark.parametrize("parallel", [False, True])
def test_hidden_dropout_is_on_all_that_a_layer_adds(parallel):
    config = tiny_config(hidden_dropout=0.25, use_parallel_residual=parallel)
    model = randomize(DCFormerForCausalLM(config)).model.train()
    ids = _tokens(length=9)
    embedded = model.embed_tokens(ids)
    for layer in model.layers:
        assert layer.dropout.p == 0.25
        layer.dropout.p = 1.0
    assert torch.equal(model(ids, output_hidden_states=True).hidden_states[1], embedded)
    assert not torch.allclose(model.eval()(ids, output_hidden_states=True).hidden_states[1], embedded)


def test_attention_implementations_are_named():
    model = DCFormerForCausalLM(tiny_config())
    assert model.config._attn_implementation == "dcformer_default"
    for name in ("sdpa", "flash_attention_2", "flex_attention"):
        with pytest.raises((ValueError, ImportError), match=name):
            DCFormerForCausalLM(tiny_config(attn_implementation=name))
    with pytest.raises(ValueError, match="nonsense"):
        model.set_attn_implementation("nonsense")
    if "dcformer_triton" not in _registered():
        with pytest.raises(ValueError, match=r"dcformer_triton.*not available here"):
            DCFormerForCausalLM(tiny_config(attn_implementation="dcformer_triton"))


def _registered():
    return transformers.AttentionInterface().valid_keys()


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_gradient_checkpointing_changes_nothing(implementation):
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation)))
    ids = _tokens(length=40)
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.train().zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert model.model.layers[0].gradient_checkpointing
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name


@pytest.mark.parametrize("training", [True, False])
def test_layers_in_torchs_checkpoint_wrapper_fill_no_cache(training):
    """As accelerate wraps them: computed again, they would write to it twice."""
    model, ids = randomize(DCFormerForCausalLM(tiny_config(attn_implementation="eager"))), _tokens(length=40)
    model.train(training)(ids, labels=ids).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, DCFormerDecoderLayer))
    output = model(ids, labels=ids)
    assert CACHE_NAME not in output
    output.loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name.replace("_checkpoint_wrapped_module.", "")])
    with pytest.raises(ValueError, match="cannot be used with gradient checkpointing"):
        model(ids, **{CACHE_NAME: DynamicCache(config=model.config)})
    with pytest.raises(ValueError, match="compose_trace with gradient checkpointing"):
        model(ids, compose_trace=ComposeTrace())
    with torch.no_grad():
        assert model(ids)[CACHE_NAME].get_seq_length() == 40


def test_compiled_training_step_is_one_graph():
    model = randomize(DCFormerForCausalLM(tiny_config())).train()
    ids = _tokens(length=40)
    model(ids, labels=ids).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_forward_options_agree():
    model = randomize(DCFormerForCausalLM(tiny_config()))
    ids = _tokens(length=24)
    full = model(ids).logits
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, full[:, -3:])
    torch.testing.assert_close(model(ids, logits_to_keep=torch.tensor([1, 5])).logits, full[:, [1, 5]])
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, full)
    shifted = model(ids, position_ids=torch.arange(7, 31)[None]).logits  # RoPE is relative
    torch.testing.assert_close(shifted, full)
    assert not torch.allclose(
        model(ids, position_ids=2 * torch.arange(24)[None], attention_mask=ids * 0 + 1).logits, full
    )
    assert torch.equal(model(ids, return_dict=False)[0], full)
    states = model(ids, output_hidden_states=True).hidden_states
    assert len(states) == 3
    assert torch.equal(states[0], model.get_input_embeddings()(ids))
    assert torch.equal(model.lm_head(states[-1]), full)


def test_loss_averages_over_the_given_number_of_items():
    model = randomize(DCFormerForCausalLM(tiny_config()))
    ids = _tokens()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    total = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(model(ids, labels=ids).loss, total / 38)
    torch.testing.assert_close(model(ids, labels=ids, num_items_in_batch=100).loss, total / 100)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_packed_documents_do_not_see_each_other(implementation):
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation)))
    first, second = _tokens(1, 30), _tokens(1, 25).flip(1)
    packed = torch.cat([first, second], dim=1)
    positions = torch.cat([torch.arange(30), torch.arange(25)])[None]
    logits = model(packed, position_ids=positions).logits
    alone = torch.cat([model(first).logits, model(second).logits], dim=1)
    torch.testing.assert_close(logits, alone)
    assert not torch.allclose(model(packed).logits, alone, atol=1e-2)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_scores_stay_float32_under_autocast(implementation):
    """As in the model's own bfloat16: the matmuls' inputs are rounded, the maps are not."""
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation)))
    seen = []
    # what meets the composed scores next
    owner, name = (dcformer.attention_dcformer, "_masked_softmax")
    if implementation == "dcformer_chunked":
        owner, name = dcformer.chunked_dcformer._Call, "hide"
    real = getattr(owner, name)

    def spy(*args):
        seen.extend(arg.dtype for arg in args[:2] if isinstance(arg, torch.Tensor) and arg.is_floating_point())
        return real(*args)

    ids = _tokens(length=30)
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
        patch.setattr(owner, name, spy)
        logits = model(ids, labels=ids).logits
    assert set(seen) == {torch.float32}
    exact = copy.deepcopy(model).double()(ids).logits
    rounded = copy.deepcopy(model).to(torch.bfloat16)(ids).logits
    # never further from float64 than the model whose parameters and residual stream are bfloat16 too
    assert (logits - exact).norm() <= (rounded - exact).norm()


@pytest.mark.parametrize("length", [10, 40])  # few queries, and the operator
@pytest.mark.parametrize("implementation", [None, "eager", "dcformer_chunked"])
def test_backward_under_autocast(implementation, length):
    """`backward()` inside of the context, as some write it, gives the gradients that it gives behind it."""
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation)))
    ids, grads = _tokens(length=length), []
    for is_inside in (True, False):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids).loss
            if is_inside:
                loss.backward()
        if not is_inside:
            loss.backward()
        grads.append([p.grad.clone() for p in model.parameters()])
    for inside, behind in zip(*grads, strict=True):
        # products with parameters are PyTorch's, and may round otherwise inside
        assert (inside - behind).norm() <= 2e-2 * behind.norm() + 1e-7


@pytest.mark.parametrize("implementation", [None, "eager", "dcformer_chunked"])
@torch.no_grad()
def test_jit_trace(implementation):
    """As TensorBoard draws a model's graph."""
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation))).eval()
    for length in (10, 40):
        ids = _tokens(length=length)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is deprecated, and sizes are constants of the trace
            traced = torch.jit.trace(Logits(model), (ids.flip(1),), check_trace=False)
            masked = torch.jit.trace(Logits(model), (ids.flip(1), torch.ones_like(ids)), check_trace=False)
        torch.testing.assert_close(traced(ids), model(ids).logits)
        padded = torch.ones_like(ids)
        padded[0, :6] = 0  # which the traced example was not
        torch.testing.assert_close(masked(ids, padded), model(ids, padded).logits)


@pytest.mark.parametrize("implementation", [None, "dcformer_chunked", "eager"])
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_checkpointed_layers_share_a_mask_in_one_graph(kind, implementation):
    model, ids = randomize(DCFormerForCausalLM(tiny_config(attn_implementation=implementation))).train(), _tokens(2, 33)
    given = {"input_ids": ids, "labels": ids, "use_cache": False}
    if kind == "padded":
        given["attention_mask"] = (torch.arange(33) >= torch.tensor([[5], [0]])).long()
    else:
        given["position_ids"] = torch.cat([torch.arange(20), torch.arange(13)])[None].expand(2, -1)
    expected = model(**given).loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="aot_eager")(**given).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["DCFormer", "DCPythia", "DHA", "HeadSystems", "a subclass", "adapters"])
def test_smoothed_labels_are_those_of_the_next_tokens(kind, tmp_path):
    """`Trainer` shifts them for models whose class it knows by name."""
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    name = kind if hasattr(dcformer, f"{kind}Config") else "DCFormer"
    config = getattr(dcformer, f"{name}Config")(**fields, num_attention_heads=2)
    model_class = getattr(dcformer, f"{name}ForCausalLM")
    model = randomize((type("Own", (model_class,), {}) if kind == "a subclass" else model_class)(config))
    if kind == "adapters":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig())
    model.eval()  # the library's trainer sees to that itself, but there is no dropout
    ids = _tokens(8, 12)
    logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)
    for batch, number in ((8, 1), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": number}
        rows = [{"input_ids": row, "labels": row} for row in ids]
        trainer = trainer_of(model, rows, tmp_path, label_smoothing_factor=0.1, **sizes)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_model_that_was_unpickled_is_a_language_model():
    """No `__init__` runs there: classes are known once they are imported."""
    program = "import dcformer; from transformers.models.auto import modeling_auto as auto"
    names = "{'DCFormerForCausalLM', 'DHAForCausalLM', 'HeadSystemsForCausalLM'}"
    check = f"assert {names} <= set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())"
    subprocess.run([sys.executable, "-c", f"{program}; {check}"], check=True)


@pytest.mark.parametrize("head", ["SequenceClassification", "regression", "TokenClassification", "head systems"])
def test_accumulated_batches_of_classifiers_are_one_batch(head, tmp_path):
    """The library's loss is a mean over a batch: `Trainer` is to divide their sum."""
    fields = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "pad_token_id": 0}
    fields |= {"num_attention_heads": 4, "num_labels": 1 if head == "regression" else 3}
    task = head if head == "TokenClassification" else "SequenceClassification"
    if head == "head systems":
        config = dcformer.HeadSystemsConfig(**fields, head_system="head_pruning")
        model = dcformer.HeadSystemsForSequenceClassification(config)
    else:
        model = getattr(dcformer, f"DCFormerFor{task}")(DCFormerConfig(**fields))
    randomize(model)
    labels = torch.arange(8) % 3
    labels = labels[:, None].expand(8, 12) if task == "TokenClassification" else labels
    labels = labels.float() if head == "regression" else labels
    rows = [{"input_ids": i + 1, "labels": j} for i, j in zip(_tokens(8, 12) % 90, labels, strict=True)]
    found = []
    for batch, number in ((8, 1), (4, 2), (2, 4)):
        sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": number}
        trainer = trainer_of(model, rows, tmp_path, **sizes)
        trainer.train()
        found.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    bound = 2e-3 if head == "head systems" else 1e-5  # gates are drawn anew for each part of a batch
    assert found[1] == pytest.approx(found[0], rel=bound)
    assert found[2] == pytest.approx(found[0], rel=bound)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "switches",
    [{}, {"compose_key": False}, {"compose_post": False}, PLAIN],
    ids=["composed", "query-wise", "scores", "plain"],
)
def test_generation_under_autocast(switches, cache):
    """Rotated keys are float32 there and values are not; caches take one dtype."""
    model = randomize(DCFormerForCausalLM(tiny_config(**switches))).eval()
    ids = _tokens(length=12)
    with torch.autocast("cpu", torch.bfloat16):
        options = {"cache_implementation": cache, "max_new_tokens": 6, "do_sample": False}
        found = model.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
    logits = torch.stack(found.logits, dim=1)  # [B, 6, V]
    with torch.no_grad():
        exact, rounded = (
            copy.deepcopy(model).to(dtype)(found.sequences[:, :-1]).logits[:, ids.shape[1] - 1 :]
            for dtype in (torch.float64, torch.bfloat16)
        )
    # about as far as the model in bfloat16: which is nearer over so few tokens is chance
    assert (logits - exact).norm() <= 1.2 * (rounded - exact).norm()


@pytest.mark.parametrize("switches", [{}, {"compose_static": True}], ids=["dynamic", "static"])
def test_offloaded_weights(switches):
    model = randomize(DCFormerForCausalLM(tiny_config(**switches)))
    ids = _tokens()
    expected = model(ids).logits
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")
    torch.testing.assert_close(offloaded(ids).logits, expected)


def test_tensor_parallelism_must_not_cut_groups():
    model = DCFormerForCausalLM(tiny_config())
    compose = model.model.layers[0].self_attn.compose
    compose.dw1_proj.weight = nn.Parameter(compose.dw1_proj.weight[: compose.dw1_proj.weight.shape[0] // 2])
    with pytest.raises(ValueError, match="compose_groups"):
        model(_tokens())


def test_output_attentions_are_the_composed_weights():
    model = randomize(DCFormerForCausalLM(tiny_config(attn_implementation="eager")))
    ids, trace = _tokens(length=16), ComposeTrace()
    out = model(ids, output_attentions=True, compose_trace=trace)
    assert len(out.attentions) == len(trace.layers) == 2
    for layer, weights in zip(trace.layers, out.attentions, strict=True):
        assert torch.equal(layer.composed_weights, weights)
        assert weights.shape == (2, 4, 16, 16)
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(2, 4, 16))
        assert not torch.allclose(layer.scores, layer.composed_scores)
        assert not torch.allclose(layer.weights, layer.composed_weights)
    chunked = randomize(DCFormerForCausalLM(tiny_config()))
    with pytest.raises(ValueError, match="eager"):
        chunked(ids, compose_trace=ComposeTrace())


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    randomize(DCFormerForCausalLM(tiny_config())).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def reported(caplog):
    """What the library has warned of so far, as one text."""
    transformers.utils.logging.enable_propagation()
    yield lambda: "\n".join(record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    transformers.utils.logging.disable_propagation()


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.compose.qkw", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
)
def test_missing_tensor(saved, name, reported):
    """The library reports it, initializes it and names it."""
    assert not any(DCFormerForCausalLM.from_pretrained(saved, output_loading_info=True)[1].values())
    assert "MISSING" not in reported()
    tensors = load_file(saved / "model.safetensors")
    del tensors[name]
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    model, info = DCFormerForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert info["missing_keys"] == {name}
    assert re.search(rf"{name}.*MISSING", reported())
    assert model.get_parameter(name).isfinite().all()


def test_task_heads_may_be_missing(saved):
    model = dcformer.DCFormerForTokenClassification.from_pretrained(saved)
    original = DCFormerForCausalLM.from_pretrained(saved)
    assert torch.equal(model.model.norm.weight, original.model.norm.weight)
    answers = dcformer.DCFormerForQuestionAnswering.from_pretrained(saved)
    assert torch.equal(answers.base_model.norm.weight, original.model.norm.weight)
    original.model.save_pretrained(saved)
    assert torch.equal(DCFormerForCausalLM.from_pretrained(saved).model.norm.weight, original.model.norm.weight)


@pytest.mark.parametrize("keep", [4, 100, 0.5, 0.999])
def test_truncated_file(saved, keep):
    file = saved / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: keep if keep > 1 else int(len(content) * keep)])
    with pytest.raises(OSError, match=r"model\.safetensors is damaged or truncated") as caught:
        DCFormerForCausalLM.from_pretrained(saved)
    assert isinstance(caught.value.__cause__, SafetensorError)  # the library's own, which names no file


def test_wrong_shape(saved, reported):
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(saved / "model.safetensors")
    tensors[name] = tensors[name][:5].contiguous()
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        DCFormerForCausalLM.from_pretrained(saved)
    assert re.search(rf"{name}.*MISMATCH", reported())


def test_checkpoint_of_another_configuration(saved, reported):
    config = json.loads((saved / "config.json").read_text())
    config["compose_static"] = True
    (saved / "config.json").write_text(json.dumps(config))
    _, info = DCFormerForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert {name.rpartition(".")[2] for name in info["missing_keys"]} == {"pre_static", "post_static"}
    assert re.search(r"pre_static.*MISSING", reported())


@pytest.mark.parametrize("bad", [97, -1])
def test_token_id_out_of_range(bad):
    model = DCFormerForCausalLM(tiny_config())
    with pytest.raises(ValueError, match=rf"token id {bad}.*97 ids"):
        model(torch.tensor([[1, bad]]))


WRONG_SHAPES = {
    "one row of ids": ({"input_ids": torch.ones(6).long()}, r"input_ids of shape \[6\]: expected \[sequences, tok"),
    "ids in a list": ({"input_ids": torch.ones(1, 2, 6).long()}, r"input_ids of shape \[1, 2, 6\]: expected"),
    "one row of states": ({"inputs_embeds": torch.ones(6, 32)}, r"inputs_embeds of shape \[6, 32\]: .*, hidden_size\]"),
    "a mask of more rows": ({"attention_mask": torch.ones(3, 6)}, r"attention_mask of shape \[3, 6\] .* 2 sequences"),
    "a mask without rows": ({"attention_mask": torch.ones(6)}, r"attention_mask of shape \[6\] .* 2 sequences"),
    "a mask of queries": ({"attention_mask": torch.ones(2, 6, 6)}, r"\[2, 6, 6\] .*\[2 or 1, tokens\], or \[2 or 1, "),
    "a whole mask of more rows": ({"attention_mask": torch.ones(3, 1, 6, 6)}, r"mask of shape \[3, 1, 6, 6\] does"),
    "more positions": ({"position_ids": torch.ones(1, 7).long()}, r"position_ids of shape \[1, 7\] .*\[2 or 1, 6\]"),
    "positions without rows": ({"position_ids": torch.arange(6)}, r"position_ids of shape \[6\] do not fit 2 seq"),
    "positions of more rows": ({"position_ids": torch.ones(3, 6).long()}, r"position_ids of shape \[3, 6\] do not fit"),
    "positions of axes": ({"position_ids": torch.ones(3, 2, 6).long()}, r"position_ids of shape \[3, 2, 6\] do not"),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_arguments_of_other_shapes_are_named(case):
    arguments, message = WRONG_SHAPES[case]
    ids = {} if {"input_ids", "inputs_embeds"} & set(arguments) else {"input_ids": _tokens(2, 6)}
    with pytest.raises(ValueError, match=message):
        DCFormerForCausalLM(tiny_config())(**ids, **arguments)


def test_arguments_for_every_sequence():
    """Positions and whole masks may have one row for all; a mask of flex_attention's kind has no shape of ours."""
    model, ids = randomize(DCFormerForCausalLM(tiny_config())).eval(), _tokens(2, 6)
    expected = model(ids).logits
    positions = torch.arange(6)
    whole = torch.ones(6, 6, dtype=torch.bool).tril() & torch.ones(6, 6, dtype=torch.bool).triu(-7)  # the window's
    for arguments in (
        {"position_ids": positions[None]},
        {"position_ids": positions.expand(2, 6)},
        {"attention_mask": whole[None, None]},
        {"attention_mask": whole.expand(2, 1, 6, 6)},
        {"attention_mask": {"full_attention": None, "sliding_attention": None}},
    ):
        torch.testing.assert_close(model(ids, **arguments).logits, expected)


@pytest.mark.parametrize("attention", ["eager", "dcformer_chunked"])
def test_one_row_of_padding_for_all_sequences(attention):
    model = randomize(DCFormerForCausalLM(tiny_config())).eval()
    model.set_attn_implementation(attention)
    ids, padding = _tokens(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=padding.expand(2, -1)).logits
    torch.testing.assert_close(model(ids, attention_mask=padding).logits, expected)


def test_cache_of_another_model():
    ids = _tokens(1, 6)
    other = DCFormerForCausalLM(tiny_config(head_dim=16))
    cache = other(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="head_dim of the model that filled it is 16, of this model 8"):
        DCFormerForCausalLM(tiny_config())(ids[:, :1], past_key_values=cache)
    own = DCFormerForCausalLM(tiny_config())
    cache = own(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="same batch"):
        own(ids[:, :1].repeat(3, 1), past_key_values=cache)
    deeper = DCFormerForCausalLM(tiny_config(num_hidden_layers=4))
    with pytest.raises(ValueError, match="2 layers"):
        deeper(ids[:, :1], past_key_values=cache)
    torch.testing.assert_close(own(ids, past_key_values=DynamicCache()).logits, own(ids).logits)


def test_input_ids_or_embeddings():
    model = DCFormerForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="exactly one"):
        model()
    with pytest.raises(ValueError, match="exactly one"):
        model(_tokens(), inputs_embeds=torch.zeros(2, 20, 32))


class _Doubled(dcformer.modeling_dcformer.DCFormerAttention):
    """A variant: twice the output."""

    def forward(self, *args, **kwargs):
        output, weights = super().forward(*args, **kwargs)
        return 2 * output, weights


class _DoubledLayer(dcformer.modeling_dcformer.DCFormerDecoderLayer):
    attention_class = _Doubled


class _DoubledModel(dcformer.DCFormerModel):
    layer_class = _DoubledLayer


class _DoubledForCausalLM(DCFormerForCausalLM):
    decoder_class = _DoubledModel


def test_a_variant_changes_its_attention_only():
    config = tiny_config(attn_implementation="eager")
    plain = randomize(DCFormerForCausalLM(config))
    variant = _DoubledForCausalLM(config).eval()
    assert {type(layer.self_attn) for layer in variant.model.layers} == {_Doubled}
    assert {type(layer.self_attn) for layer in plain.model.layers} == {dcformer.modeling_dcformer.DCFormerAttention}
    variant.load_state_dict(plain.state_dict())
    ids = _tokens(length=12)
    assert not torch.allclose(variant(ids).logits, plain(ids).logits)
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.o_proj.weight *= 2
    torch.testing.assert_close(variant(ids).logits, plain(ids).logits)
    assert len(variant(ids, output_attentions=True).attentions) == 2
    cache = variant(ids[:, :7], use_cache=True).past_key_values
    torch.testing.assert_close(variant(ids[:, 7:], past_key_values=cache).logits, variant(ids).logits[:, 7:])


def test_integer_mask_is_boolean():
    model = randomize(DCFormerForCausalLM(tiny_config()))
    ids, mask = _tokens(), torch.ones(2, 1, 20, 20).tril()
    mask[..., 5:, 3] = 0  # not what the model would make itself
    additive = torch.zeros_like(mask).masked_fill(mask == 0, float("-inf"))
    expected = model(ids, attention_mask=additive).logits
    assert not torch.allclose(expected, model(ids).logits)
    for dtype in (torch.long, torch.bool):
        torch.testing.assert_close(model(ids, attention_mask=mask.to(dtype)).logits, expected)


def test_ill_fitting_mask():
    model = DCFormerForCausalLM(tiny_config())
    with pytest.raises(ValueError, match="does not fit"):
        model(_tokens(), attention_mask=torch.ones(2, 1, 20, 19))


def test_masks_by_kind_of_layer_are_of_each_kind():
    model = DCFormerForCausalLM(tiny_config(layer_pattern="LG"))
    mask = torch.ones(2, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match=r"masks for \['full_attention'\], and none for .* 'sliding_attention' layers"):
        model(_tokens(), attention_mask={"full_attention": mask})


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked", "sdpa"])
def test_layers_without_a_mask_are_causal_and_keep_their_windows(implementation):
    fields = PLAIN if implementation == "sdpa" else {}
    model = randomize(DCFormerForCausalLM(tiny_config(layer_pattern="LG", sliding_window=5, **fields))).eval()
    model.set_attn_implementation(implementation)
    ids, none = _tokens(), {"full_attention": None, "sliding_attention": None}
    expected = model(ids).logits
    torch.testing.assert_close(model(ids, attention_mask=none).logits, expected, rtol=0, atol=1e-6)
    both_ways = {kind: torch.ones(2, 1, 20, 20, dtype=torch.bool) for kind in none}
    found = [model(ids, attention_mask=masks, is_causal=False).logits for masks in (none, both_ways)]
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        steps = [model(ids[:, :11], past_key_values=cache, attention_mask=none).logits]
        steps += [model(ids[:, i : i + 1], past_key_values=cache, attention_mask=none).logits for i in range(11, 20)]
        torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-5)


# --- what reaches a model around its checks ---------------------------------------------------------------------------


@pytest.fixture
def tiny_model():
    return randomize(DCFormerForCausalLM(tiny_config())).eval()


def test_a_name_in_the_configuration_that_cannot_compose_is_refused(tiny_model):
    """`from_config(model.config, attn_implementation=...)` is refused, but has written the name there by then."""
    model, ids = tiny_model, torch.arange(1, 9)[None]
    expected = model(ids).logits
    with pytest.raises(ValueError, match="sdpa"):
        AutoModelForCausalLM.from_config(model.config, attn_implementation="sdpa")
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="'sdpa', which the configuration names, cannot compose"):
        model(ids)
    model.set_attn_implementation(None)
    assert torch.equal(model(ids).logits, expected)


def test_bounds_of_documents_need_position_ids(tiny_model):
    model, ids, bounds = tiny_model, torch.arange(1, 9)[None], torch.tensor([0, 3, 8])
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    with pytest.raises(ValueError, match="position_ids say where documents begin"):
        model(ids, **given)
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    packed = model(ids, position_ids=position_ids, **given).logits
    torch.testing.assert_close(packed[:, 3:], model(ids[:, 3:]).logits)
    for others in ({"attention_mask": torch.ones_like(ids)}, {CACHE_NAME: DynamicCache()}):  # not packed, with either
        with pytest.raises(ValueError, match=r"cu_seq_lens_q and cu_seq_lens_k are not read.*no attention_mask and no"):
            model(ids, position_ids=position_ids, **given, **others)
    with pytest.raises(ValueError, match="seq_idx is not read: position_ids say"):
        model(ids, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]]))


@torch.no_grad()
def test_frequencies_of_rope_are_float32_whatever_the_model_is(tmp_path):
    """Rounded, positions would drift apart, and a model be another one once it is saved and loaded."""
    model = randomize(DCFormerForCausalLM(tiny_config(head_dim=16, max_position_embeddings=512))).eval()
    model.save_pretrained(tmp_path)
    loaded = DCFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ids = torch.arange(500)[None] % 97
    for moved in (model.to(torch.bfloat16), model.to("cpu", torch.bfloat16), model.bfloat16()):
        assert moved.model.rotary_emb.inv_freq.dtype == torch.float32
        assert torch.equal(moved(ids).logits, loaded(ids).logits)
    assert model.to("meta").model.rotary_emb.inv_freq.device.type == "meta"
    assert model.to_empty(device="cpu").model.rotary_emb.inv_freq.shape == (8,)


def test_a_trace_is_a_compose_trace(tiny_model):
    with pytest.raises(ValueError, match="compose_trace is of type list"):
        tiny_model(torch.arange(1, 9)[None], compose_trace=[])


def test_save_pretrained_takes_its_arguments_by_position(tiny_model, tmp_path):
    tiny_model.save_pretrained(tmp_path, True, None, False, "50GB", None, None, True, True)
    again = DCFormerForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in tiny_model.state_dict().items())
