"""The model with "dcformer_triton" against "eager": every switch, every cache, generation, training, compilation.

Tolerances come from eager attention in float64: the kernels' error may be a few times that of eager in the same dtype,
as they sum in another order, plus a few roundings of the result.
"""

import copy
import ctypes
import functools

import pytest
import torch
from helpers import randomize, tiny_config
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")
INTERPRETED = triton.knobs.runtime.interpret
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1 for Triton's interpreter", allow_module_level=True)

from dcformer import (  # noqa: E402  # after the skips
    DCFormerCompose,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    SideWeights,
)
from dcformer.cache_dcformer import use_static_layers  # noqa: E402
from dcformer.kernels import composed_attention, ops, passes  # noqa: E402
from dcformer.kernels.schemas import new_kept  # noqa: E402
from dcformer.masks_dcformer import chunked_mask  # noqa: E402
from dcformer.modeling_dcformer import DCFormerAttention  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
LENGTH = 20  # the window of local layers is 8
# Of two layers, a local and a global one.
CONFIGS = {
    "grouped-query": {},
    "mha": {"num_key_value_heads": 4},
    "groups": {"num_key_value_heads": 4, "compose_groups": 2},
    "static": {"compose_static": True, "compose_groups": 2},
    "no gate": {"compose_gate": False, "compose_rank": 1},
    "gate only": {"compose_projection": False},
    "query": {"compose_key": False, "compose_rank": 3},
    "key": {"compose_query": False},
    "pre": {"compose_post": False},
    "post": {"compose_pre": False, "compose_rank": 4},
    "talking heads": {"compose_query": False, "compose_key": False, "compose_static": True},
    "dcpythia": None,
}


@functools.cache
def model_named(name):
    """A model in which composition matters."""
    if CONFIGS[name] is not None:
        return randomize(DCFormerForCausalLM(tiny_config(**CONFIGS[name]))).to(DEVICE)
    config = DCPythiaConfig(**tiny_config(num_key_value_heads=4, head_dim=8).to_dict() | {"model_type": "dcpythia"})
    return randomize(DCPythiaForCausalLM(config)).to(DEVICE)


def tokens(batch=1, length=LENGTH):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(5)).to(DEVICE)


def with_implementation(model, name):
    model.set_attn_implementation(name)
    model.zero_grad()
    return model


def compared(model, call):
    """What `call(model)` returns, a tensor or a dict of them: exact, with eager, with the kernels."""
    exact = with_implementation(copy.deepcopy(model).double(), "eager")
    out = [call(exact)]
    for implementation in ("eager", "dcformer_triton"):
        out.append(call(with_implementation(model, implementation)))
    return [one if isinstance(one, dict) else {"": one} for one in out]


def assert_as_exact(truth, low, found):
    """Norms of errors at most twice those of eager, and four roundings; single numbers differ by chance.

    In float32 four times: the kernels' scores are times log2(e), and their weights exp2(score - log-sum-exp), two
    roundings of the size of a score where eager has one. Gradients of keys were 1.5 to 3.2 times eager's over three
    inputs.
    """
    assert truth.keys() == low.keys() == found.keys()
    for name, expected in truth.items():
        error, yardstick = ((x[name].double() - expected).norm().item() for x in (found, low))
        band = 4 * torch.finfo(low[name].dtype).eps * expected.norm().item()
        times = 4 if low[name].dtype == torch.float32 else 2
        assert error <= times * yardstick + band, f"{name}: {error:.3g} against {yardstick:.3g} (band {band:.3g})"


class Operators(TorchDispatchMode):
    """Collects the arguments of this package's operators, by name."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "dcformer":
            self.calls.setdefault(function.__name__.partition(".")[0], []).append(args)
        return function(*args, **(kwargs or {}))

    def counts(self):
        return {name: len(calls) for name, calls in self.calls.items()}


def same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# --- inference --------------------------------------------------------------------------------------------------------


def make_cache(kind, config, total):
    if kind == "dynamic":
        return DynamicCache(config=config)
    cache = StaticCache(config=config, max_cache_len=total)
    if kind == "ring":
        use_static_layers(cache, config.sliding_window)
    return cache


@torch.no_grad()
def in_pieces(model, ids, sizes, kind="dynamic", mask=None):
    """Logits of all tokens [B, T, V], piece by piece; the first piece is the prefill."""
    cache, logits, start = make_cache(kind, model.config, ids.shape[1]), [], 0
    mask = torch.ones_like(ids) if mask is None else mask
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for part in ids.split(sizes, dim=1):
        stop = start + part.shape[1]
        options = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits.append(model(part, past_key_values=cache, **options).logits)
        start = stop
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_prefill_and_decoding(name):
    """A prefill by the forward kernels, then one token and several by those for few queries, past the window."""
    model, ids = model_named(name), tokens()
    truth, low, found = compared(model, lambda m: in_pieces(m, ids, [17, 1, 2]))
    assert_as_exact(truth, low, found)
    with torch.no_grad():
        whole = with_implementation(copy.deepcopy(model).double(), "eager")(ids).logits
    torch.testing.assert_close(truth[""], whole)


@pytest.mark.parametrize("kind", ["dynamic", "static", "ring"])
def test_token_by_token_with_left_padding(kind):
    """Three rows of different lengths; the window fills up while decoding, and moves on."""
    ids = tokens(3, 10)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    sizes = [7, 1, 1, 1]
    results = compared(model_named("mha"), lambda m: in_pieces(m, ids, sizes, kind, mask)[mask.bool()])
    assert_as_exact(*results)


@pytest.fixture
def fused():
    """Name -> a copy of a model, its projections fused."""

    def make(name):
        model = copy.deepcopy(model_named(name))
        model.fuse_projections()
        return model

    return make


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_prefill_and_decoding(name, fused):
    truth, low, found = compared(fused(name), lambda m: in_pieces(m, tokens(), [17, 1, 2]))
    assert_as_exact(truth, low, found)


@pytest.mark.parametrize("kind", ["dynamic", "static", "ring"])
def test_fused_token_by_token_with_left_padding(kind, fused):
    ids, sizes = tokens(3, 10), [7, 1, 1, 1]
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    results = compared(fused("groups"), lambda m: in_pieces(m, ids, sizes, kind, mask)[mask.bool()])
    assert_as_exact(*results)


@pytest.mark.parametrize("is_fused", [False, True], ids=["", "fused"])
@torch.no_grad()
def test_layers_without_a_mask_keep_their_windows(is_fused, fused):
    """Also where a cache keeps all of a window's keys."""
    model, ids = fused("mha") if is_fused else model_named("mha"), tokens()

    def without_masks(model):
        cache, none = DynamicCache(), dict.fromkeys(model.config.layer_types)
        return torch.cat([model(part, none, past_key_values=cache).logits for part in ids.split([17, 1, 2], 1)], 1)

    truth, low, found = compared(model, without_masks)
    assert_as_exact(truth, low, found)
    torch.testing.assert_close(truth[""], with_implementation(copy.deepcopy(model).double(), "eager")(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize(("padded", "count"), [(0, 2), (5, 4)], ids=["no padding", "padding"])
def test_layers_share_what_a_mask_says(padded, count, monkeypatch):
    """Made once for all layers with a window and once for those without; without padding once for all calls."""
    made, real, ids = [], ops._make_bounds, tokens(2, 24)
    monkeypatch.setattr(ops, "_known_bounds", {})
    monkeypatch.setattr(ops, "_make_bounds", lambda *args: made.append(args) or real(*args))
    kinds = ["sliding_attention", "full_attention"] * 2
    model = randomize(DCFormerForCausalLM(tiny_config(num_hidden_layers=4, layer_types=kinds))).to(DEVICE)
    mask = torch.ones_like(ids)
    mask[:, :padded] = 0

    def call(model):
        return model(ids, attention_mask=mask).logits[mask.bool()]

    for _ in range(2):
        found = call(with_implementation(model, "dcformer_triton"))
    assert len(made) == count
    truth, low = (call(with_implementation(copy.deepcopy(model).to(t), "eager")) for t in (torch.float64, model.dtype))
    assert_as_exact({"": truth}, {"": low}, {"": found})


@torch.no_grad()
def test_fused_decoding_is_one_operator_of_a_layer(fused):
    """Rows go to their place in a growing cache, those of windows too."""
    model, ids = with_implementation(fused("mha"), "dcformer_triton"), tokens()
    assert sorted(set(model.config.layer_types)) == ["full_attention", "sliding_attention"]
    cache = DynamicCache(config=model.config)
    for part, counts in (
        (ids[:, :17], {"composed_attention": 2, "generate_packed": 2}),  # two layers
        (ids[:, 17:18], {"decode_step": 2}),
    ):
        with Operators() as operators:
            model(part, past_key_values=cache)
        assert operators.counts() == counts
    for layer, (_, _, keys, values, *_) in zip(cache.layers, operators.calls["decode_step"], strict=True):
        assert same_memory(keys, layer.keys) and same_memory(values, layer.values)


VARIANTS = {
    "_project": lambda self, x: [2 * part for part in DCFormerAttention._project(self, x)],
    "_normalize": lambda self, query, key: (query, 0.5 * key),
    "_place": lambda self, query, key, value, *args: (query, key, 2 * value),
    "_attend": lambda self, *args, **kwargs: (2 * DCFormerAttention._attend(self, *args, **kwargs)[0], None),
    "_output": lambda self, output, *args: self.o_proj(output.flatten(2).sin()),
}


class Doubled(DCFormerCompose):
    """A variant of composition."""

    def forward(self, *args, **kwargs):
        generated, statics = super().forward(*args, **kwargs)
        return {name: SideWeights(2 * side.packed) for name, side in generated.items()}, statics


@torch.no_grad()
def test_variants_of_composition_make_their_own_weights(fused):
    """In decoding as in prefill, fused or not: the generators' kernels would make those of the class itself."""
    variant, plain = (copy.deepcopy(model_named("mha")) for _ in range(2))
    for layer in (*variant.model.layers, *plain.model.layers):
        layer.self_attn.compose.__class__ = Doubled
    ids = tokens()
    expected = in_pieces(with_implementation(plain, "eager"), ids, [17, 1, 2])
    for fuses in (False, True):
        if fuses:
            variant.fuse_projections()
        found = in_pieces(with_implementation(variant, "dcformer_triton"), ids, [17, 1, 2])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    other = in_pieces(with_implementation(model_named("mha"), "eager"), ids, [17, 1, 2])
    assert (expected - other).abs().max() > 1e-2


@pytest.mark.parametrize("step", VARIANTS)
@pytest.mark.parametrize("implementation", ["eager", "dcformer_triton"])
@torch.no_grad()
def test_variants_take_their_own_steps_when_they_are_fused(step, implementation, fused):
    """Each step that a subclass overrides is taken in prefill and decoding, whatever kernels there are."""
    variant, plain = (copy.deepcopy(model_named("mha")) for _ in range(2))
    variant_class = type("Variant", (DCFormerAttention,), {step: VARIANTS[step]})
    assert variant_class.own_steps == {step}
    for model in (variant, plain):
        for layer in model.model.layers:
            layer.self_attn.__class__ = variant_class
    variant.fuse_projections()
    ids = tokens()
    found, expected = (in_pieces(with_implementation(m, implementation), ids, [17, 1, 2]) for m in (variant, plain))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    other = in_pieces(with_implementation(model_named("mha"), implementation), ids, [17, 1, 2])
    assert (found[:, 17:] - other[:, 17:]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["static", "ring"])
@torch.no_grad()
def test_fused_decoding_writes_to_a_static_cache(kind, fused):
    """Rows of global layers go to their place, single tokens of windows too, where these are rings and do not move."""
    model, ids = with_implementation(fused("mha"), "dcformer_triton"), tokens()
    assert sorted(set(model.config.layer_types)) == ["full_attention", "sliding_attention"]
    cache = make_cache(kind, model.config, ids.shape[1])
    model(ids[:, :17], past_key_values=cache)
    for start, stop in ((17, 19), (19, 20)):
        with Operators() as operators:
            model(ids[:, start:stop], past_key_values=cache)
        mixed = {"composed_decode": 1, "prepare_decode": 1, "decode_step": 1}
        assert operators.counts() == ({"decode_step": 2} if kind == "ring" and stop == start + 1 else mixed)
        assert cache.get_seq_length(model.config.layer_types.index("full_attention")) == stop
    layers = [layer for layer in cache.layers if kind == "ring" or not layer.is_sliding]
    for layer, (_, _, keys, values, *_) in zip(layers, operators.calls["decode_step"], strict=True):
        assert same_memory(keys, layer.keys) and same_memory(values, layer.values)


@pytest.mark.parametrize("name", ["mha", "grouped-query", "groups"])
def test_decoding_takes_the_kernels_of_decoding(name):
    model = with_implementation(model_named(name), "dcformer_triton")
    ids, cache = tokens(), DynamicCache(config=model.config)
    for part, attention in ((ids[:, :17], "composed_attention"), (ids[:, 17:18], "composed_decode")):
        with torch.no_grad(), Operators() as operators:
            model(part, past_key_values=cache)
        assert operators.counts() == {attention: 2, "generate_packed": 2}  # two layers
    with torch.no_grad(), Operators() as operators:
        model(ids[:, :5], use_cache=False)
    assert operators.counts() == {"composed_decode": 2, "generate_weights": 2}
    with Operators() as operators:  # few queries, but gradients are needed
        model(ids[:, :5], labels=ids[:, :5], use_cache=False).loss.backward()
    names = ("composed_attention", "composed_attention_backward", "generate_weights", "generate_weights_backward")
    counts = dict.fromkeys(names, 2)
    assert operators.counts() == counts
    for _, _, _, weights, *_ in operators.calls["composed_attention"]:
        assert len(weights) == 4 and all(
            same_memory(weights[0], w) for w in weights
        )  # what the generators made, as it is


@pytest.mark.parametrize("name", ["mha", "grouped-query", "groups", "static", "no gate", "key"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "ring"])
@pytest.mark.parametrize("length", [17, 1], ids=["prefill", "decoding"])
def test_key_sides_are_read_where_the_cache_keeps_them(name, kind, length):
    """No copy of the keys' weights: what the operators get is the memory of the layer's own keys and values."""
    model, ids = with_implementation(model_named(name), "dcformer_triton"), tokens()
    cache = make_cache(kind, model.config, ids.shape[1])
    if length == 1:
        with torch.no_grad():
            model(ids[:, :17], past_key_values=cache)
    with torch.no_grad(), Operators() as operators:
        model(ids[:, -length:], past_key_values=cache)
    calls = operators.calls["composed_attention" if length > 1 else "composed_decode"]
    assert len(calls) == 2
    for layer, (_, key, value, weights, _, plan, _) in zip(cache.layers, calls, strict=True):
        sides = {place: w for place, w in zip(plan[-len(weights) :], weights, strict=True) if place in (1, 4)}
        assert sorted(sides) == [1, 4]
        for states, held, side in ((key, layer.keys, sides[1]), (value, layer.values, sides[4])):
            assert same_memory(states, side) and side.stride(3) == 1 and side.shape[1] == states.shape[1]
            assert same_memory(states, held) or is_of_a_window(kind, length, layer)


def is_of_a_window(kind, length, layer):
    """A prefill longer than the window returns all keys, in memory of their own, and keeps the last; a ring puts them
    in order, where the fused step, which has them as they are, is not used."""
    return (length > 1 or kind == "ring") and getattr(layer, "is_sliding", False)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masks_of_any_pattern_for_few_queries(kind):
    ids = tokens(2, 6)
    visible = (torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE)
    visible[1, :, 2] = False  # sees nothing

    def call(model):
        mask = visible
        if kind == "additive":
            mask = torch.zeros(visible.shape, dtype=model.dtype, device=DEVICE)
            mask = mask.masked_fill(~visible, torch.finfo(model.dtype).min)
        return model(ids, attention_mask=mask, use_cache=False).logits

    assert_as_exact(*compared(model_named("mha"), call))


MODES = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "sampled": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 2},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", MODES)
def test_generate(mode):
    """The tokens of eager attention, within the window and beyond it; two rows are padded."""
    model, ids = model_named("mha"), tokens(2 if mode == "static" else 1, 7)
    mask = torch.ones_like(ids)
    mask[-1, : 4 * (len(ids) - 1)] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    options |= {"disable_compile": True} | MODES[mode]
    out = []
    for implementation in ("eager", "dcformer_triton"):
        torch.manual_seed(0)
        out.append(with_implementation(model, implementation).generate(ids, **options))
    assert torch.equal(*out)


def test_assisted_generation():
    """Drafts of another model, by the kernels too, are verified several tokens at a time."""
    model, assistant, ids = model_named("mha"), model_named("grouped-query"), tokens(1, 7)
    with_implementation(assistant, "dcformer_triton")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = with_implementation(model, "eager").generate(ids, **options)
    found = with_implementation(model, "dcformer_triton").generate(ids, assistant_model=assistant, **options)
    assert torch.equal(found, expected)


# --- training ---------------------------------------------------------------------------------------------------------


def training_step(model, ids, labels=None, **options):
    """Loss and the gradients of all parameters."""
    loss = model(ids, labels=ids if labels is None else labels, **options).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
def test_training_step(name):
    ids = tokens(length=11)
    results = compared(model_named(name), lambda m: training_step(m, ids, use_cache=name == "static"))
    assert_as_exact(*results)


@pytest.mark.parametrize("rows", ["padded", "packed"])
def test_training_step_of_several_rows(rows):
    ids = tokens(2 if rows == "padded" else 1, 19)
    options, labels = {"use_cache": False}, ids.clone()
    if rows == "packed":
        options["position_ids"] = torch.cat([torch.arange(8), torch.arange(11)])[None].to(DEVICE)
    else:
        options["attention_mask"] = torch.ones_like(ids)
        options["attention_mask"][0, :5] = 0
        labels[0, :5] = -100
    assert_as_exact(*compared(model_named("mha"), lambda m: training_step(m, ids, labels, **options)))


@pytest.mark.parametrize(
    ("save_maps", "is_reentrant", "kept"),
    [(False, None, 0), (False, False, 0), (True, None, 2), (True, False, 4), (True, True, 2)],
)
def test_kept_maps_and_gradient_checkpointing_change_nothing(save_maps, is_reentrant, kept, monkeypatch):
    """Both layers keep maps; those of checkpoints in both forward passes, or where that is with gradients. (There are
    more tokens than kernels of decoding take.)"""
    model, ids, made = copy.deepcopy(model_named("mha")), tokens(length=17), []
    expected = training_step(with_implementation(model, "dcformer_triton").train(), ids, use_cache=False)
    monkeypatch.setattr(passes, "new_kept", lambda *args: made.append(new_kept(*args)) or made[-1])
    model.config.save_maps = save_maps
    if is_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    found = training_step(with_implementation(model, "dcformer_triton").train(), ids, use_cache=False)
    assert len(made) == kept
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_autocast():
    """Matrix products in bfloat16, weights float32, cached or not. The kernels keep maps in bfloat16, eager in float32:
    up to twice eager's distance from float64."""
    ids = tokens(length=11)

    def call(model, cached):
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=model.dtype == torch.float32)
        with torch.no_grad(), autocast:
            if cached:
                return in_pieces(model, ids, [9, 1, 1])
        with autocast:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}

    for cached in (False, True):
        truth, low, found = compared(model_named("mha"), lambda m, cached=cached: call(m, cached))
        for name, expected in truth.items():  # norms, as single numbers differ by chance
            error, yardstick = ((x[name].double() - expected).norm() for x in (found, low))
            band = torch.finfo(torch.bfloat16).eps * expected.norm()
            assert error <= 2 * yardstick + band, (name, error, yardstick)


# --- modules that are more than their parameters ----------------------------------------------------------------------


class Adapter(nn.Module):
    """What LoRA puts in the place of a linear layer."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapt(compose):
    compose.dw1_proj = Adapter(compose.dw1_proj)


def hook(compose):
    compose.gate_proj.register_forward_hook(lambda module, inputs, output: 2 * output)


def hook_all(compose):
    compose.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0], *inputs[1:]))


def parametrize(compose):
    torch.nn.utils.parametrizations.weight_norm(compose.dw1_proj)
    compose.dw1_proj.parametrizations.weight.original0.data.mul_(2)


@pytest.mark.parametrize("change", [adapt, hook, hook_all, parametrize])
def test_modules_that_are_more_than_their_weights(change):
    model, ids = copy.deepcopy(model_named("mha")), tokens(length=5)
    torch.manual_seed(0)
    for layer in model.model.layers:
        change(layer.self_attn.compose)
    model.to(DEVICE)
    with Operators() as operators:
        results = compared(model, lambda m: in_pieces(m, ids, [4, 1]))
    assert_as_exact(*results)
    assert operators.counts() == {"composed_decode": 4}
    plain = with_implementation(model_named("mha"), "eager")
    assert (in_pieces(plain, ids, [4, 1]) - results[2][""]).abs().max() > 1e-3  # the change matters


# --- compilation ------------------------------------------------------------------------------------------------------


class GraphCounter:
    """A backend that counts graphs; runs them through AOTAutograd."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


@pytest.mark.parametrize("save_maps", [False, True])
def test_compiled_training_step_is_one_graph(save_maps):
    model, ids, backend = copy.deepcopy(model_named("mha")), tokens(length=9), GraphCounter()
    expected = training_step(with_implementation(model, "dcformer_triton"), ids, use_cache=False)
    model.zero_grad()
    model.config.save_maps = save_maps
    found = training_step(torch.compile(model, fullgraph=True, backend=backend), ids, use_cache=False)
    assert backend.graphs == 1
    for name, value in expected.items():
        torch.testing.assert_close(found["_orig_mod." + name if name != "loss" else name], value)


@torch.no_grad()
def test_lengths_and_scales_of_one_graph():
    """Where a graph is made for any sizes, the scale of the scores is a symbol, too."""
    counts = {}
    for implementation in ("dcformer_chunked", "dcformer_triton"):
        torch._dynamo.reset()
        model, backend = with_implementation(copy.deepcopy(model_named("mha")), implementation), GraphCounter()
        compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
        for length in (9, 12, 13):
            ids = tokens(length=length)
            found, expected = (call(ids, use_cache=False).logits for call in (compiled, model))
            torch.testing.assert_close(found, expected)
        counts[implementation] = backend.graphs
    assert counts["dcformer_triton"] == counts["dcformer_chunked"] <= 2
    scaled = torch.compile(lambda q, scale: composed_attention(q, q, q, scale=scale), fullgraph=True, backend="eager")
    query = torch.randn(1, 2, 5, 16, device=DEVICE)
    for scale in (0.3, 0.4, 0.5):
        torch.testing.assert_close(scaled(query, scale), composed_attention(query, query, query, scale=scale))


@torch.no_grad()
@pytest.mark.parametrize("is_fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("name", ["mha", "grouped-query"])
def test_compiled_decoding_is_one_graph(name, is_fused, fused):
    """Each step of a static cache is the same graph, while the window fills up and after."""
    model = fused(name) if is_fused else model_named(name)
    model, ids, backend = with_implementation(model, "dcformer_triton"), tokens(1, 11), GraphCounter()
    step = torch.compile(model, fullgraph=True, backend=backend)
    caches = [make_cache("ring", model.config, ids.shape[1]) for _ in range(2)]
    for cache in caches:
        model(ids[:, :7], past_key_values=cache)
    for t in range(7, ids.shape[1]):
        position = torch.tensor([[t]], device=DEVICE)
        expected, found = (
            call(ids[:, t : t + 1], past_key_values=cache, position_ids=position).logits
            for call, cache in zip((model, step), caches, strict=True)
        )
        torch.testing.assert_close(found, expected)
    assert backend.graphs == 1


@torch.no_grad()
def test_a_dynamic_cache_goes_in_and_out_of_graphs(fused):
    """A step of a graph after one that filled lent memory, in layers with windows and without, and the reverse."""
    model, ids = with_implementation(fused("grouped-query"), "dcformer_triton"), tokens(1, 14)
    compiled = torch.compile(model, backend="eager")
    cache, expected = DynamicCache(config=model.config), in_pieces(model, ids, [10, 1, 1, 1, 1])
    steps = [(model, 10), (model, 1), (compiled, 1), (model, 1), (compiled, 1)]
    found, start = [], 0
    for call, count in steps:
        found.append(call(ids[:, start : start + count], past_key_values=cache).logits)
        start += count
    torch.testing.assert_close(torch.cat(found, 1), expected)


# --- operators --------------------------------------------------------------------------------------------------------


def test_operators_as_the_model_calls_them():
    """Schemas, fake kernels, autograd and dynamic shapes of every operator, with a model's own arguments."""
    model, ids = with_implementation(model_named("static"), "dcformer_triton"), tokens(length=3)
    with Operators() as operators:
        model(ids, labels=ids, use_cache=False).loss.backward()
        in_pieces(model, ids, [2, 1])

    def leaf(argument, requires_grad):
        if isinstance(argument, torch.Tensor):
            return argument.detach().requires_grad_(requires_grad and argument.is_floating_point())
        return [leaf(a, requires_grad) for a in argument] if isinstance(argument, list) else argument

    names = [f"{name}{way}" for name in ("composed_attention", "generate_weights") for way in ("", "_backward")]
    assert sorted(operators.calls) == sorted([*names, "generate_packed", "composed_decode"])
    for name, calls in operators.calls.items():
        differentiable = name in ("composed_attention", "generate_weights")
        arguments = tuple(leaf(a, differentiable) for a in calls[0])
        torch.library.opcheck(getattr(torch.ops.dcformer, name).default, arguments)


def test_sharded_training_step():
    """FSDP2 in a group of one: parameters are sharded between steps and whole inside a layer."""
    from torch.distributed import HashStore, destroy_process_group, init_process_group
    from torch.distributed.fsdp import fully_shard

    model, ids = copy.deepcopy(model_named("mha")), tokens(length=9)
    expected = training_step(with_implementation(model, "dcformer_triton"), ids, use_cache=False)
    model.zero_grad()
    init_process_group("gloo" if INTERPRETED else "nccl", store=HashStore(), rank=0, world_size=1)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        with Operators() as operators:
            found = training_step(model, ids, use_cache=False)
    finally:
        destroy_process_group()
    assert operators.counts()["generate_weights"] == 2
    for name, value in expected.items():
        other = found[name]
        torch.testing.assert_close(other.full_tensor() if hasattr(other, "full_tensor") else other, value)


# --- limits -----------------------------------------------------------------------------------------------------------


def test_masks_with_gaps_are_found_in_graphs_too():
    model = with_implementation(copy.deepcopy(model_named("mha")), "dcformer_triton")
    ids = tokens()
    gaps = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()
    compiled = torch.compile(lambda mask: model(ids, attention_mask=mask).logits, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(gaps), model(ids, attention_mask=gaps).logits)
        gaps[:, :, 4, 2] = False
        if DEVICE == "cuda":  # where it leaves a process that can do nothing more: `test_gpu` has it in one of its own
            return
        with pytest.raises(RuntimeError, match="without gaps"):
            compiled(gaps)


@pytest.mark.skipif(DEVICE == "cuda", reason="there is no interpreter in this run")
def test_interpreted_kernels_are_used_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = with_implementation(copy.deepcopy(model_named("mha")), "dcformer_triton")
    with torch.no_grad(), Operators() as operators:
        model(tokens())
    assert "composed_attention" in operators.counts()


def test_what_the_kernels_do_not_do():
    model = with_implementation(copy.deepcopy(model_named("mha")), "dcformer_triton")
    ids = tokens()
    gaps = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=DEVICE).tril()
    gaps[:, :, 4, 2] = False
    with pytest.raises(ValueError, match=r"without gaps.*dcformer_chunked"):
        model(ids, attention_mask=gaps)
    for length in (4, LENGTH):
        biases = torch.zeros(1, 1, length, length, device=DEVICE)
        biases[..., 0] = 0.5
        with torch.no_grad(), pytest.raises(ValueError, match="add no biases"):
            model(ids[:, :length], attention_mask=biases)
        with torch.no_grad(), pytest.raises(ValueError, match="does not fit 1 sequences"):
            model(ids[:, :length], attention_mask=torch.ones(2, 1, length, length, dtype=torch.bool, device=DEVICE))
    for length in (4, LENGTH):
        empty = torch.zeros(1, 1, length, length, device="meta")
        with torch.no_grad(), pytest.raises(ValueError, match="attention_mask is on device 'meta'"):
            model(ids[:, :length], attention_mask=empty)
    for length in (4, LENGTH):
        heads = torch.ones(1, 4, length, length, dtype=torch.bool, device=DEVICE).tril()
        with torch.no_grad(), pytest.raises(ValueError, match="no mask per head: use attn_implementation='eager'"):
            model(ids[:, :length], attention_mask=heads)
    for length in (4, LENGTH):
        with torch.no_grad(), pytest.raises(ValueError, match=r"torch.float64.*'eager'"):
            copy.deepcopy(model).double()(ids[:, :length])
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"attention_dropout=0.1.*dcformer_chunked"):
        model.train()(ids)


# --- launches that are repeated ---------------------------------------------------------------------------------------


@pytest.fixture
def choices(monkeypatch):
    """How often operators of decoding choose launches. The interpreter's launches can be repeated, too."""
    from dcformer.kernels import decode, generator, prepare, repeated, step

    right, first, counted = repeated.Launch.run, repeated.Repeated._first, []

    class Interpreted:
        """What a launch returns in place of a compiled kernel."""

        def __init__(self, launch):
            self.kernel = launch.kernel
            self.dtypes = {name: x.dtype for name, x in launch.arguments.items() if isinstance(x, torch.Tensor)}

        def __getitem__(self, grid):
            def call(*values):
                named = dict(zip(self.kernel.arg_names, values, strict=True))
                for name, dtype in self.dtypes.items():  # addresses, of which the interpreter has to know what is there
                    memory = (ctypes.c_char * dtype.itemsize).from_address(named[name])
                    named[name] = torch.frombuffer(memory, dtype=dtype)
                self.kernel[grid](**named)

            return call

    def run(self):
        kernel = right(self)
        return Interpreted(self) if kernel is None else kernel

    def choose(self, *arguments):
        counted.append(self.choose)
        return first(self, *arguments)

    monkeypatch.setattr(repeated.Launch, "run", run)
    monkeypatch.setattr(repeated.Repeated, "_first", choose)
    for module in (decode, generator, prepare, step):
        monkeypatch.setattr(module, "_RUN", repeated.Repeated(module.launches, module._RUN.key_of))
    return counted


@pytest.mark.parametrize("fuse", [False, True], ids=["", "fused"])
@pytest.mark.parametrize(
    "fields",
    [{"num_key_value_heads": 4}, pytest.param(CONFIGS["static"], marks=pytest.mark.long)],
    ids=["mha", "grouped, static"],
)
@torch.no_grad()
def test_layers_repeat_the_launches_of_the_first(fields, fuse, choices):
    """Three layers, the launches chosen by one, give what the definition gives."""
    fields = {"num_hidden_layers": 3, "sliding_window": None} | fields
    model = randomize(DCFormerForCausalLM(tiny_config(**fields))).to(DEVICE).eval()
    ids, lengths = tokens(2, 14), (8, 1, 1, 1, 1, 2)
    truth = copy.deepcopy(with_implementation(model, "eager")).double()(ids).logits
    allowed = 4 * (model(ids).logits.double() - truth).abs().max() + 1e-6 * truth.abs().max()
    with_implementation(model, "dcformer_triton")
    if fuse:
        model.fuse_projections()
    cache, found = DynamicCache(config=model.config), []
    for step in ids.split(lengths, dim=1):
        before = len(choices)
        found.append(model(step, past_key_values=cache).logits)
        assert len(choices) - before <= 2  # of attention, and of what makes its weights: or of both in one
    assert (torch.cat(found, 1).double() - truth).abs().max() <= allowed
    # attention of 8, 1 and 2 tokens, whatever the length of the cache, and what makes weights for as many: in one where
    # there is a cache to write to
    assert len(choices) == (2 + 1 + 1 if fuse else 3 + 3)


@pytest.mark.parametrize("shape", [(2, 1, 9), (3, 1, 6), (2, 2, 6)])
def test_masks_by_blocks_of_another_shape_are_refused_in_decoding(shape):
    """Also where nothing is padded, and the mask is not read."""
    batch, length, keys = shape
    mask = chunked_mask(batch, length, keys, q_offset=keys - length, device=torch.device(DEVICE))
    assert mask.is_plain
    with pytest.raises(ValueError, match=r"does not fit 2 sequences, 1 queries and 6 keys"):
        ops.visible_keys(nn.Identity(), mask, None, True, (2, 1, 6), torch.device(DEVICE))
