"""Projections of a layer as one product: the same numbers, parameters and files, and errors where it would mislead."""

import copy
import functools
import io
import pickle

import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from helpers import randomize, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForSequenceClassification, StaticCache

from dcformer import ComposeTrace, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dcformer.cache_dcformer import use_static_layers
from dcformer.export import export_decoding_step

IMPLEMENTATIONS = ("eager", "dcformer_chunked")
CONFIGS = {
    "default": {},
    "plain": {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False},
    "talking heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "no gate": {"compose_gate": False},
    "gate only": {"compose_projection": False, "compose_static": True},
    "query-wise": {"compose_key": False},
    "groups": {"compose_groups": 2, "num_key_value_heads": 4, "compose_rank": 3},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no qk-norm": {"qk_norm": False},
}
NAMES = ("q_proj", "k_proj", "v_proj", "compose.dw1_proj", "compose.gate_proj")


@functools.cache
def _original(name):
    torch.manual_seed(0)
    if name == "dcpythia":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return randomize(DCPythiaForCausalLM(DCPythiaConfig(vocab_size=97, sliding_window=8, **sizes)))
    return randomize(DCFormerForCausalLM(tiny_config(**CONFIGS[name])))


def make(name="default", implementation=None):
    model = copy.deepcopy(_original(name))
    model.set_attn_implementation(implementation)
    return model


def fused(*arguments):
    model = make(*arguments)
    model.fuse_projections()
    return model


def tokens(batch=2, length=20):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(3))


def attentions(model):
    return [layer.self_attn for layer in model.base_model.layers]


def storages(model):
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())


# --- numbers ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", [*CONFIGS, "dcpythia"])
def test_as_exact_as_unfused(name, implementation):
    """The error of float32 against float64 is that of a model that is not fused. Prompts are long and short."""
    model, other = make(name, implementation), fused(name, implementation)
    exact = make(name, implementation).double()
    for length in (1, 3, 40):  # one product of few rows, and of many
        ids = tokens(length=length)
        truth = exact(ids).logits
        allowed, error = ((m(ids).logits - truth).abs().max() for m in (model, other))
        # a wider product may sum in another order; both orders are equally good
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps * truth.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("name", ["default", "biases"])
def test_wider_dtypes_agree_to_their_last_digits(name):
    model, other = make(name).double(), fused(name).double()
    torch.testing.assert_close(other(tokens()).logits, model(tokens()).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 7}], ids=str)
@pytest.mark.parametrize("name", ["default", "groups", "gate only", "dcpythia"])
def test_generates_the_same(name, options):
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "attention_mask": tokens().ne(0)}
    expected = make(name).generate(tokens(), **settings)
    assert torch.equal(fused(name).generate(tokens(), **settings, **options), expected)


@torch.no_grad()
def test_traces_and_maps_are_there():
    model, trace = fused("default", "eager"), ComposeTrace()
    output = model(tokens(), compose_trace=trace, output_attentions=True)
    expected = make("default", "eager")(tokens(), output_attentions=True)
    assert len(trace.layers) == 2
    torch.testing.assert_close(output.attentions, expected.attentions)


@torch.no_grad()
def test_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = make()(tokens()).logits, fused()(tokens()).logits
    exact = make().double()(tokens()).logits
    allowed, error = ((logits - exact).abs().max() for logits in (expected, found))
    assert error <= 2 * allowed


class Products(TorchDispatchMode):
    """Counts products with a weight."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.linear.default):
            self.rows.append(args[-1].shape[1])
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_one_product_in_the_place_of_five():
    counts = []
    for model in (make(), fused()):
        with Products() as products:
            model.base_model.layers[0].self_attn(
                torch.zeros(1, 1, 32), model.base_model.rotary_emb(torch.zeros(1), torch.zeros(1, 1, dtype=torch.long))
            )
        counts.append(products.rows)
    assert counts == [[32, 16, 16, 64, 16, 32], [144, 32]]  # q, k, v, C·K and C·M rows, and o_proj


def test_compiles_to_one_graph():
    """A compiled decoding step is one graph, with the product of the fused weight in it."""
    graphs, model = [], fused()
    torch._dynamo.reset()

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    cache = StaticCache(config=model.config, max_cache_len=32)
    use_static_layers(cache, model.config.sliding_window)
    expected = make()(tokens(1), use_cache=False).logits[:, -1]
    with torch.no_grad():
        model(tokens(1)[:, :-2], past_key_values=cache)
        step = torch.compile(model, backend=keep, fullgraph=True)
        for position in (18, 19):
            found = step(
                tokens(1)[:, position : position + 1],
                past_key_values=cache,
                position_ids=torch.tensor([[position]]),
            )
    torch.testing.assert_close(found.logits[:, -1], expected)
    assert len(graphs) == 1
    products = [node for node in graphs[0].graph.nodes if node.target is torch.nn.functional.linear]
    assert len(products) == 2 * 5 + 1  # per layer: this one, o_proj and three of the MLP; and lm_head


# --- parameters and files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["default", "biases", "gate only", "plain", "dcpythia"])
def test_parameters_stay_what_they_are(name):
    model = make(name)
    before, size = dict(model.named_parameters()), storages(model)
    values = {key: p.detach().clone() for key, p in before.items()}
    model.fuse_projections()
    assert (
        storages(model)
        == size
        + sum(  # no second copy; the biases of layers that have none are zeros
            4 * (a.fused.weight.shape[0] - sum(len(a.get_submodule(n).weight) for n in NAMES[:3]))
            for a in attentions(model)
            if a.fused.bias is not None
        )
    )
    for attention in attentions(model):
        rows = [linear.weight for linear in attention.projections().values() if linear is not None]
        assert {w.untyped_storage().data_ptr() for w in rows} == {attention.fused.weight.untyped_storage().data_ptr()}
    model.fuse_projections()  # a second time: nothing to do
    for step in (lambda: None, model.unfuse, model.unfuse):
        step()
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        for key, parameter in after.items():
            assert parameter is before[key] and parameter.requires_grad
            assert torch.equal(parameter, values[key])
    assert storages(model) == size and all(a.fused is None for a in attentions(model))


def test_checkpoints_do_not_change(tmp_path):
    make().save_pretrained(tmp_path / "one")
    model = fused()
    model.save_pretrained(tmp_path / "two")
    assert {f.name for f in (tmp_path / "one").iterdir()} == {f.name for f in (tmp_path / "two").iterdir()}
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    assert all(a.fused.is_intact(a.projections().values()) for a in attentions(model))
    expected = make().state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.state_dict().items())
    assert model.state_dict().keys() == expected.keys()


def test_other_ways_to_save(tmp_path):
    """What takes tensors of one memory to be the same would leave out all but one of them."""
    model, expected = fused(), make().state_dict()
    safetensors.torch.save_model(model, tmp_path / "model.safetensors")
    Accelerator(cpu=True).save_model(model, tmp_path)
    for loaded in (safetensors.torch.load_file(file) for file in tmp_path.glob("*.safetensors")):
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    kept = model.state_dict(keep_vars=True)
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())
    model.unfuse()
    of_weight = model.state_dict()["model.layers.0.self_attn.k_proj.weight"]
    assert of_weight.data_ptr() == model.model.layers[0].self_attn.k_proj.weight.data_ptr()


def test_inference_mode_leaves_nothing_behind():
    """Its tensors could neither be trained nor written to."""
    model = make()
    with torch.inference_mode():
        model.fuse_projections()
        model(tokens())
        state_dict = model.state_dict()
    model.load_state_dict(make().state_dict())
    with torch.inference_mode():
        model.unfuse()
    make().load_state_dict(
        {name: tensor for name, tensor in state_dict.items() if "q_proj" in name}, False, assign=True
    )
    model.train()
    model(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
def test_state_dicts_are_loaded_in_place():
    source = make()
    for parameter in source.parameters():
        parameter.mul_(1.5)
    model = fused()
    model.load_state_dict(source.state_dict())
    torch.testing.assert_close(model(tokens()).logits, source(tokens()).logits, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_moved_and_converted_models_stay_fused():
    model = fused().to(torch.bfloat16)
    for attention in attentions(model):
        assert attention.fused.weight.dtype == torch.bfloat16
        assert attention.fused.is_intact(attention.projections().values())
    torch.testing.assert_close(model(tokens()).logits, make().bfloat16()(tokens()).logits, rtol=0.05, atol=0.05)
    kept = [a.fused for a in attentions(model)]
    model.to(torch.bfloat16)  # nothing to do, nothing done
    assert all(a.fused is one for a, one in zip(attentions(model), kept, strict=True))
    model.share_memory()
    model(tokens())


@torch.no_grad()
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_whole_and_not_fused(how):
    model = fused()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    assert all(a.fused is None for a in attentions(other))
    assert all(a.fused is not None for a in attentions(model))
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(other(tokens()).logits, make()(tokens()).logits)
    assert len({p.untyped_storage().data_ptr() for p in other.parameters()}) == len(list(other.parameters()))
    other.fuse_projections()
    other(tokens())


@torch.no_grad()
def test_copies_of_compiled_layers_are_not_compiled():
    """As torch's own modules: what is compiled computes with the original's parameters."""
    model = make()
    attentions(model)[0].compile(backend="eager")
    expected, other = model(tokens()).logits, copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    torch.testing.assert_close(other(tokens()).logits, expected)
    pickle.dumps(model)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_training_is_refused():
    model = make().train()
    with pytest.raises(ValueError, match=r"training mode: call model\.eval\(\)"):
        model.fuse_projections()
    model = fused()
    with pytest.raises(ValueError, match=r"layer 0 are fused.*gradients are enabled: call model\.unfuse\(\)"):
        model(tokens())
    with pytest.raises(ValueError, match=r"in training mode: call model\.unfuse\(\)"), torch.no_grad():
        model.train()(tokens())
    model.unfuse()
    model(tokens(), labels=tokens()).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(ValueError, match="holds a gradient"):
        model.eval().fuse_projections()


class Adapter(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight = inner.weight

    def forward(self, x):
        return self.inner(x) * 2


def _wrap(attention):
    attention.v_proj = Adapter(attention.v_proj)


def _hook(attention):
    attention.compose.dw1_proj.register_forward_hook(lambda *_: None)


def _tie(attention):
    attention.k_proj.weight = attention.v_proj.weight


def _tie_memory(attention):
    attention.k_proj.weight.data = attention.v_proj.weight.data


def _empty(attention):
    attention.to("meta")


def _cut(attention):
    attention.q_proj.weight = nn.Parameter(attention.q_proj.weight[:16].detach())


def _mix(attention):
    attention.compose.gate_proj.bfloat16()


def _quantize(attention):
    class Quantized(nn.Parameter):
        pass

    attention.q_proj.weight = Quantized(attention.q_proj.weight.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_wrap, r"layers\.1\.self_attn\.v_proj is more than a torch\.nn\.Linear \(.*\.Adapter"),
        (_hook, r"layers\.1\.self_attn\.compose\.dw1_proj is more than .* perhaps with hooks"),
        (_tie, r"layers\.1\.self_attn\.k_proj shares its memory|v_proj shares its memory"),
        (_tie_memory, r"k_proj shares its memory with another parameter"),
        (_empty, r"q_proj is \(32, 32\) on meta, expected \(32, 32\) with data"),
        (_cut, r"q_proj is \(16, 32\) on cpu, expected \(32, 32\)"),
        (_mix, r"q_proj torch\.float32 on cpu, .*gate_proj torch\.bfloat16 on cpu"),
        (_quantize, r"q_proj is more than .*its weight Quantized"),
    ],
)
def test_layers_that_cannot_be_fused(change, message):
    model = make()
    change(attentions(model)[1])
    with pytest.raises(ValueError, match=message):
        model.fuse_projections()
    assert all(a.fused is None for a in attentions(model))  # not one


@torch.no_grad()
@pytest.mark.parametrize("change", [_wrap, _hook, _tie, _tie_memory, _cut, _quantize])
def test_changes_after_fusing_do_not_go_unnoticed(change):
    model, expected = fused(), make()
    for one in (model, expected):
        change(attentions(one)[1])
    with pytest.raises(ValueError, match=r"layer 1 have changed since they were fused.*model\.unfuse\(\)"):
        model(tokens())
    model.unfuse()
    if change is not _cut:
        assert torch.equal(model(tokens()).logits, expected(tokens()).logits)


@torch.no_grad()
def test_assigned_state_dict_does_not_go_unnoticed():
    model = fused()
    model.load_state_dict(make().state_dict(), assign=True)
    with pytest.raises(ValueError, match="have changed since they were fused"):
        model(tokens())
    model.unfuse()
    model.fuse_projections()
    model(tokens())


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(make(), peft.LoraConfig())
    with pytest.raises(ValueError, match=r"q_proj is more than .*merge or remove adapters"):
        adapted.eval().fuse_projections()
    merged = adapted.merge_and_unload().eval()
    merged.fuse_projections()
    with torch.no_grad():
        expected = merged(tokens()).logits
        later = peft.get_peft_model(merged, peft.LoraConfig()).eval()
        with pytest.raises(ValueError, match=r"call model\.unfuse\(\)"):
            later(tokens())
        later.unfuse()
        torch.testing.assert_close(later(tokens()).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_other_heads_and_repeated_layers():
    torch.manual_seed(0)
    config = tiny_config(pad_token_id=0)
    model = randomize(AutoModelForSequenceClassification.from_config(config))
    expected = model(tokens()).logits
    model.fuse_projections()
    torch.testing.assert_close(model(tokens()).logits, expected)
    base = copy.deepcopy(model).base_model
    base.layers[1] = base.layers[0]
    expected = base(tokens()).last_hidden_state
    base.fuse_projections()
    torch.testing.assert_close(base(tokens()).last_hidden_state, expected)


@torch.no_grad()
def test_static_cache_in_pieces():
    model, other = make(), fused()
    results = []
    for one in (model, other):
        cache = StaticCache(config=one.config, max_cache_len=32)
        results.append([one(part, past_key_values=cache).logits for part in tokens().split(6, dim=1)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


def test_exported_step_of_a_fused_model():
    program = export_decoding_step(fused(), 1, 16).module()
    expected = export_decoding_step(make(), 1, 16).module()
    for position, token in enumerate(tokens(1, 5)[0]):
        inputs = {"input_ids": token.view(1, 1), "cache_position": torch.tensor([position])}
        torch.testing.assert_close(program(**inputs), expected(**inputs), rtol=1e-5, atol=1e-5)
