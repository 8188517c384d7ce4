"""Head embeddings (MHE): the layer is an MHA layer with tied weights, and one key and one value serve all heads."""

import copy
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from helpers import PLAIN, REPOSITORY, randomize, tiny_config
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from dcformer import ComposeTrace, DCFormerConfig, DCFormerForCausalLM, parameter_groups
from dcformer.analysis import num_parameters
from dcformer.cache_report import cache_bytes_per_token, measured_bytes_per_layer
from dcformer.export import export_decoding_step, plain_model
from dcformer.heads_dcformer import EMBEDDING_NAMES, embedding_init_std
from dcformer.modeling_dcformer import DCFormerAttention, attention_class_of

sys.path.insert(0, str(REPOSITORY / "examples"))
import dha_study
import mhe_study

MODES = ("add", "mul")
LLAMA = PLAIN | {"qk_norm": False, "sliding_window": None, "num_key_value_heads": None}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5}  # across the whole head
VARIANTS = {
    "plain": LLAMA,
    "biases, QK-norm, partial RoPE": LLAMA | {"attention_bias": True, "qk_norm": True, "partial_rotary_factor": 0.5},
    "windows": LLAMA | {"sliding_window": 8},
    "composed": {"num_key_value_heads": None},
    "composed, partial RoPE, windows": {"num_key_value_heads": None, "partial_rotary_factor": 0.25},
    "composed, proportional RoPE": {"num_key_value_heads": None, "rope_parameters": PROPORTIONAL},
    "static, three groups of one": {
        "num_key_value_heads": None,
        "num_attention_heads": 3,
        "head_dim": 8,
        "compose_groups": 3,
        "compose_static": True,
    },
    "one head": LLAMA | {"num_attention_heads": 1, "head_dim": 8},
    "two channels": LLAMA | {"head_dim": 2},
}
NO_ROPE = (torch.zeros(1, 1, 0), torch.zeros(1, 1, 0))  # cosines and sines of no channels


def make(mode: str, variant: str = "plain", **fields) -> DCFormerForCausalLM:
    config = tiny_config(**(VARIANTS[variant] | {"head_embeddings": mode} | fields))
    return randomize(DCFormerForCausalLM(config)).double()


def inputs(length: int = 21) -> dict[str, torch.Tensor]:
    """Two sequences, the first padded on the left, with positions shifted by it."""
    ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def rope(length: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    if not rotary_dim:
        return tuple(angles.double().expand(1, length, 0) for angles in NO_ROPE)
    speeds = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = (torch.arange(length).double()[:, None] * speeds).repeat(1, 2)[None]
    return angles.cos(), angles.sin()


def layer(mode: str | None, **fields) -> DCFormerAttention:
    config = tiny_config(**(LLAMA | {"head_embeddings": mode, "layer_types": ["full_attention"] * 2} | fields))
    config._attn_implementation = "eager"
    attention = attention_class_of(config)(config, 0).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
    return attention.eval()


def run(attention: DCFormerAttention, rotary_dim: int, cache: bool = False, length: int = 9, **options) -> torch.Tensor:
    x = torch.randn(2, length, 32, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    past = DynamicCache() if cache else None
    return attention(x, rope(length, rotary_dim), past_key_values=past, **options)[0]


def tied(attention: DCFormerAttention) -> DCFormerAttention:
    """An ordinary layer with a query, key and value head each: the weights that embeddings make of the seeds."""
    config = attention.config
    fields = {name: getattr(config, name) for name in ("head_dim", "num_attention_heads", "attention_bias")}
    other = layer(None, **fields)
    with torch.no_grad():
        for kind in ("q", "k", "v"):
            seed, mine = (getattr(a, f"{kind}_proj") for a in (attention, other))
            e = getattr(attention, f"{kind}_embedding")
            bias = torch.zeros_like(e[0]) if seed.bias is None else seed.bias
            for head in range(len(e)):
                rows = slice(head * config.head_dim, (head + 1) * config.head_dim)
                if config.head_embeddings == "mul":
                    mine.weight[rows] = torch.diag(e[head] + 1) @ seed.weight
                    own = (e[head] + 1) * bias
                else:
                    mine.weight[rows] = seed.weight
                    own = bias + e[head]
                if mine.bias is None:
                    mine.bias = nn.Parameter(torch.zeros_like(mine.weight[:, 0]))
                mine.bias[rows] = own
        other.o_proj.load_state_dict(attention.o_proj.state_dict())
    return other


def test_only_seeds_are_projected(monkeypatch):
    """No layer of the size of ordinary queries is made, not even for a while."""
    made, initialize = [], nn.Linear.reset_parameters

    def noted(self: nn.Linear) -> None:
        made.append(tuple(self.weight.shape))
        initialize(self)

    monkeypatch.setattr(nn.Linear, "reset_parameters", noted)
    attention = layer("mul")
    assert made == [(8, 32), (8, 32), (8, 32), (32, 32)]
    assert made == [tuple(module.weight.shape) for module in attention.modules() if isinstance(module, nn.Linear)]


# --- 1: the same layer, the same model --------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("fields", [{}, {"attention_bias": True}, {"num_attention_heads": 1, "head_dim": 8}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_layer_is_an_ordinary_one_with_tied_weights(mode, fields, rotary_dim, cache):
    attention = layer(mode, **fields)
    expected = run(tied(attention), rotary_dim)
    torch.testing.assert_close(run(attention, rotary_dim, cache), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("mode", "family"), [("mul", "Llama"), ("add", "Qwen2")])
def test_whole_models_are_llama_and_qwen2(mode, family, tmp_path):
    model = make(mode).float()
    plain = plain_model(model)
    assert type(plain).__name__ == f"{family}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(plain(**inputs()).logits, model(**inputs()).logits, atol=1e-5, rtol=0)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(plain) and torch.equal(loaded(**inputs()).logits, plain(**inputs()).logits)


@pytest.mark.parametrize("rope", [None, PROPORTIONAL], ids=["default", "proportional"])
@pytest.mark.parametrize("mode", MODES)
def test_export_with_biases_and_tied_embeddings(mode, rope):
    model = make(mode, attention_bias=True, tie_word_embeddings=True, rope_parameters=rope)
    plain = plain_model(model)
    assert type(plain) is transformers.LlamaForCausalLM
    torch.testing.assert_close(
        plain(**inputs()).logits, model(**inputs()).logits, atol=1e-6, rtol=0
    )  # its RoPE: float32


def test_export_with_biases_of_the_mlp_alone():
    """Heads that add embeddings need biases of q, k and v, and Llama has one of the output with them: of zeros."""
    model = make("add", mlp_bias=True)
    plain = plain_model(model)
    assert type(plain) is transformers.LlamaForCausalLM and not plain.model.layers[0].self_attn.o_proj.bias.any()
    torch.testing.assert_close(plain(**inputs()).logits, model(**inputs()).logits, atol=1e-6, rtol=0)


def test_a_model_of_one_head_is_not_loaded_without_its_embeddings(tmp_path):
    """Its shapes are those of an ordinary one."""
    make("mul", num_attention_heads=1, head_dim=8).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"head_embeddings=None does not fit .*trained with 'mul'"):
        AutoModelForCausalLM.from_pretrained(tmp_path, head_embeddings=None)


@pytest.mark.parametrize(
    ("variant", "fields", "message"),
    [
        ("composed", {"head_embeddings": "mul"}, "composes=True"),
        ("plain", {"head_embeddings": "add", "qk_norm": True}, "qk_norm=True"),
        ("plain", {"head_embeddings": "add", "partial_rotary_factor": 0.5}, "rotary_dim=4"),
        ("windows", {"head_embeddings": "add"}, "sliding_attention"),
        ("plain", {"head_embeddings": None}, "no head_embeddings"),
    ],
)
def test_what_has_no_plain_counterpart_is_refused(variant, fields, message):
    model = DCFormerForCausalLM(tiny_config(**(VARIANTS[variant] | fields)))
    with pytest.raises(ValueError, match=message):
        plain_model(model)


# --- 2: shared keys, caches -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_shared_keys_are_those_of_each_head_and_so_are_gradients(mode, variant, implementation):
    model = make(mode, variant)
    if implementation == "sdpa" and model.config.composes:
        pytest.skip("does not compose heads")
    batch, reference = inputs(), copy.deepcopy(model)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(implementation)
    visible = batch["attention_mask"].bool()
    found = []
    for one, cache in ((reference, None), (model, None), (model, DynamicCache(config=model.config))):
        one.zero_grad()
        logits = one(**batch, past_key_values=cache, use_cache=cache is not None).logits[visible]
        logits.square().sum().backward()
        found.append((logits.detach(), {name: p.grad.clone() for name, p in one.named_parameters()}))
    (expected, gradients), *others = found
    for logits, own in others:
        torch.testing.assert_close(logits, expected, atol=1e-12, rtol=0)
        for name, gradient in own.items():
            torch.testing.assert_close(
                gradient, gradients[name], atol=1e-10, rtol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_decoding_is_one_pass(mode, variant, dtype):
    model = make(mode, variant).to(dtype)
    batch, cache, logits = inputs(), DynamicCache(config=model.config), []
    for part in (slice(0, 9), *(slice(i, i + 1) for i in range(9, 21))):
        seen = batch["attention_mask"][:, : part.stop]
        arguments = {"attention_mask": seen, "position_ids": batch["position_ids"][:, part]}
        logits.append(model(batch["input_ids"][:, part], past_key_values=cache, **arguments).logits)
    visible = batch["attention_mask"].bool()
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    expected = model(**batch, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, dim=1)[visible], expected[visible], atol=tolerance, rtol=0)


@pytest.mark.parametrize("variant", ["plain", "composed, partial RoPE, windows", "biases, QK-norm, partial RoPE"])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_to_generate_gives_the_same_tokens(mode, variant):
    model = make(mode, variant)
    batch = {name: tensor for name, tensor in inputs().items() if name != "position_ids"}
    options = {"max_new_tokens": 10, "do_sample": False}
    tokens = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(model.generate(**batch, **options), tokens)
    assert torch.equal(model.generate(**batch, **options, cache_implementation="static"), tokens)
    beams = model.generate(**batch, **options, num_beams=3, use_cache=False)
    assert torch.equal(model.generate(**batch, **options, num_beams=3), beams)
    one = {name: tensor[1:] for name, tensor in batch.items()}
    assert torch.equal(model.generate(**one, **options, prompt_lookup_num_tokens=3), model.generate(**one, **options))


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_half_precision_far_into_a_sequence(mode):
    """The two halves of a wide key are no less precise at position 4096 than the definition is, per head.

    The allowance is the package's rule: twice the error of the definition in bfloat16, against float64.
    """
    model = make(mode, max_position_embeddings=8192)
    ids = torch.randint(0, 97, (1, 17), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(17)[None] + 4096
    exact = model(ids, position_ids=positions, use_cache=False).logits
    model = model.to(torch.bfloat16)
    model.set_attn_implementation("eager")
    error = (model(ids, position_ids=positions, use_cache=False).logits.double() - exact).abs()
    cache, steps = DynamicCache(config=model.config), []
    for i in range(17):
        steps.append(model(ids[:, i : i + 1], position_ids=positions[:, i : i + 1], past_key_values=cache).logits)
    shared = (torch.cat(steps, dim=1).double() - exact).abs()
    assert shared.mean() <= 2 * error.mean() and shared.max() <= 2 * error.max() + 0.01 * exact.abs().max()


@torch.no_grad()
def test_half_precision_over_a_long_cache():
    """One step of bfloat16 behind 4096 tokens errs no more than that of the ordinary layer with tied weights, twice.

    The band beside it is a rounding of the output.
    """
    x = torch.randn(1, 4097, 32, generator=torch.Generator().manual_seed(8), dtype=torch.float64)

    def last(attention: DCFormerAttention, dtype: torch.dtype) -> torch.Tensor:
        attention, cache = attention.to(dtype), DynamicCache()
        attention.config._attn_implementation = "sdpa"
        before, now = ([part[:, at].to(dtype) for part in rope(4097, 8)] for at in (slice(4096), slice(4096, None)))
        attention(x[:, :4096].to(dtype), before, past_key_values=cache)
        attention.config._attn_implementation = "eager"
        return attention(x[:, 4096:].to(dtype), now, past_key_values=cache)[0].double()

    exact = last(tied(layer("mul")), torch.float64)
    torch.testing.assert_close(last(layer("mul"), torch.float64), exact, atol=1e-12, rtol=0)
    ordinary, shared = ((last(a, torch.bfloat16) - exact).abs() for a in (tied(layer("mul")), layer("mul")))
    assert shared.mean() <= 2 * ordinary.mean() + 2**-8 * exact.abs().mean()


# --- 3 to 6: what the embeddings do -----------------------------------------------------------------------------------


def test_without_embeddings_both_are_one_map_used_by_every_head():
    layers = {mode: layer(mode) for mode in MODES}
    with torch.no_grad():
        for attention in layers.values():
            for name in EMBEDDING_NAMES:
                getattr(attention, name).zero_()
    for cache in (False, True):
        add, mul = (run(layers[mode], 8, cache) for mode in MODES)
        assert torch.equal(add, mul)
    single = layer(None, num_attention_heads=1, head_dim=8)
    with torch.no_grad():
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(single, name).load_state_dict(getattr(layers["add"], name).state_dict())
        single.o_proj.weight.copy_(layers["add"].o_proj.weight.unflatten(1, (4, 8)).sum(1))
    torch.testing.assert_close(run(single, 8), run(layers["add"], 8), atol=1e-12, rtol=0)


@pytest.mark.parametrize("cache", [False, True], ids=["per head", "shared"])
@pytest.mark.parametrize(
    ("rotary_dim", "fields", "acts"),
    [
        (0, {}, False),
        (4, {}, True),
        (0, {"compose_pre": True, "compose_query": True}, False),  # query-wise weights are the same for all keys
        (0, {"compose_pre": True, "compose_static": True}, False),
        (0, {"compose_pre": True, "compose_key": True}, True),
    ],
)
def test_key_embeddings_that_are_added_act_by_rope_or_key_wise_composition(rotary_dim, fields, acts, cache):
    attention = layer("add", **fields)
    if cache:  # the configuration's rotary dim is of another model than this one without RoPE
        attention.config.rope_parameters["partial_rotary_factor"] = rotary_dim / 8
    before = run(attention, rotary_dim, cache)
    before.square().sum().backward()
    gradient = attention.k_embedding.grad.abs().max()
    with torch.no_grad():
        attention.k_embedding += 0.1 + 0.1 * torch.arange(8)
    change = (run(attention, rotary_dim, cache) - before).abs().max()
    if acts:
        assert change > 1e-3 and gradient > 1e-3 * before.square().sum()
    else:
        assert change <= 1e-12 and gradient <= 1e-12 * before.square().sum()


@pytest.mark.parametrize("cache", [False, True], ids=["per head", "shared"])
def test_value_embeddings(cache):
    """Added: an output bias of the layer. Multiplied: factors of the output projection's columns."""
    add, mul = layer("add"), layer("mul")
    before = run(add, 8, cache)
    bias = (add.v_embedding.flatten() @ add.o_proj.weight.T).detach()
    with torch.no_grad():
        add.v_embedding.zero_()
    torch.testing.assert_close(before, run(add, 8, cache) + bias, atol=1e-12, rtol=0)
    before = run(mul, 8, cache)
    with torch.no_grad():
        mul.o_proj.weight *= (mul.v_embedding + 1).flatten()
        mul.v_embedding.zero_()
    torch.testing.assert_close(before, run(mul, 8, cache), atol=1e-12, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("length", [9, 20])  # few queries, and blocks
@pytest.mark.parametrize("cache", [False, True], ids=["per head", "shared"])
def test_a_row_that_sees_nothing_gives_the_output_bias(cache, length, implementation):
    attention = layer("add", attention_bias=True)
    attention.config._attn_implementation = implementation
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    mask[0, :, :3] = False
    output = run(attention, 8, cache, length, attention_mask=mask)
    assert torch.equal(output[0, :3], attention.o_proj.bias.expand(3, -1))
    assert not torch.allclose(output[1, :3], attention.o_proj.bias.expand(3, -1))


@pytest.mark.parametrize("cache", [False, True], ids=["per head", "shared"])
def test_without_rope_query_and_key_factors_are_one(cache):
    attention = layer("mul")
    if cache:
        attention.config.rope_parameters["partial_rotary_factor"] = 0
    before = run(attention, 0, cache)
    with torch.no_grad():
        attention.q_embedding.copy_((attention.q_embedding + 1) * (attention.k_embedding + 1) - 1)
        attention.k_embedding.zero_()
    torch.testing.assert_close(run(attention, 0, cache), before, atol=1e-12, rtol=0)


@pytest.mark.parametrize("factor", [0.0, 2.0])
def test_factors_of_nothing_and_of_two(factor):
    attention = layer("mul")
    with torch.no_grad():
        for name in EMBEDDING_NAMES:
            getattr(attention, name)[::2] = factor - 1
    expected = run(tied(attention), 8)
    for cache in (False, True):
        torch.testing.assert_close(run(attention, 8, cache), expected, atol=1e-12, rtol=0)


# --- 7 and 8: counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_counted_parameters(mode, variant):
    model = make(mode, variant)
    assert num_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


def attention_millions(hidden: int, heads: int, sublayers: int, **fields) -> float:
    """Attention's parameters without biases, all sublayers, in millions, counted from the model's tensors."""
    config = SimpleNamespace(hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=1, vocab_size=1)
    config = DCFormerConfig(**vars(config), **(PLAIN | {"qk_norm": False} | fields))
    with torch.device("meta"):
        attention = attention_class_of(config)(config, 0)
    return sublayers * sum(parameter.numel() for parameter in attention.parameters()) / 1e6


@pytest.mark.parametrize(
    ("hidden", "heads", "sublayers", "mha", "mhe"),
    [
        (768, 12, 12, 28.312, 8.88),  # BERT-size encoder; the poster prints 28.32 for MHA, a misprint
        (512, 8, 18, 18.87, 6.52),  # translation: N layers have 3N/2 sublayers
        (512, 16, 18, 18.87, 5.63),
        (512, 4, 18, 18.87, 8.29),
        (512, 8, 12, 12.58, 4.34),
        (512, 8, 24, 25.17, 8.69),
        (768, 12, 18, 42.47, 13.31),
        (1024, 16, 18, 75.50, 22.47),
    ],
)
def test_counts_of_the_poster(hidden, heads, sublayers, mha, mhe):
    d = hidden // heads
    assert attention_millions(hidden, heads, sublayers) == pytest.approx(mha, abs=0.005)
    found = {mode: attention_millions(hidden, heads, sublayers, head_embeddings=mode) for mode in MODES}
    assert found["add"] == found["mul"] == pytest.approx(mhe, abs=0.005)
    difference = sublayers * ((3 * heads**2 - 3 * heads) * d**2 - 3 * heads * d) / 1e6
    assert attention_millions(hidden, heads, sublayers) - found["mul"] == pytest.approx(difference)
    if heads == 12 and sublayers == 12:
        multi_query = attention_millions(hidden, heads, sublayers, num_key_value_heads=1)
        assert multi_query == pytest.approx(15.34, abs=0.006)
        output = (heads * d) ** 2  # the poster's other rows, from its formulas
        for queries_keys_values, printed in ((3 * d**2 * heads, 8.85), (d**2 * heads**2, 14.16), (2 * output, 21.23)):
            assert sublayers * (queries_keys_values + output) / 1e6 == pytest.approx(printed, abs=0.005)
        assert sublayers * 3 * heads * d == 27_648  # what MHE has beyond a single head


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_a_cache(mode, variant):
    model, length = make(mode, variant).float(), 7  # within the window
    config, cache = model.config, DynamicCache()
    model(torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    held = [(entry.keys, entry.values) for entry in cache.layers]
    assert all(states.shape[1] == config.num_key_value_heads == 1 for pair in held for states in pair)
    channels = sum(config.compose_cache_channels(stage) for stage in ("pre", "post"))
    per_layer = (2 * config.head_dim + config.rotary_dim + channels) * 4
    assert sum(states.nbytes for pair in held for states in pair) == length * 2 * per_layer
    assert cache_bytes_per_token(config, torch.float32)[1] == 2 * per_layer
    assert measured_bytes_per_layer(config, torch.float32) == per_layer


def test_bytes_at_the_posters_size():
    sizes = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 1}
    mhe, mha = (DCFormerConfig(**sizes, **PLAIN, head_embeddings=mode) for mode in ("mul", None))
    assert cache_bytes_per_token(mhe, torch.int8)[0] == 192 and cache_bytes_per_token(mha, torch.int8)[0] == 1536
    composed = DCFormerConfig(**sizes, head_embeddings="mul")
    assert [composed.compose_cache_channels(stage) for stage in ("pre", "post")] == [64, 64]  # beside 128 and 64
    assert DCFormerConfig(**sizes, head_embeddings="mul", compose_key=False).compose_cache_channels("pre") == 0


# --- initialization, training, files ----------------------------------------------------------------------------------


def variation(**fields) -> float:
    """Mean total variation between the attention maps of two heads at initialization."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "num_attention_heads": 12}
    config = DCFormerConfig(
        vocab_size=8, num_hidden_layers=1, intermediate_size=8, sliding_window=None,
        **(PLAIN | {"qk_norm": False} | sizes | fields),
    )  # fmt: skip
    model = DCFormerForCausalLM(config)
    model.set_attn_implementation("eager")
    x = torch.randn(2, 64, config.hidden_size)
    with torch.no_grad():
        _, maps = model.model.layers[0].self_attn(x, model.model.rotary_emb(x, torch.arange(64)[None]))
    pairs = torch.combinations(torch.arange(config.num_attention_heads))
    return (maps[:, pairs[:, 0]] - maps[:, pairs[:, 1]]).abs().sum(-1).mean().item() / 2


@pytest.mark.parametrize("fields", [{}, {"hidden_size": 64, "num_attention_heads": 8}], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_heads_differ_at_first_as_much_as_ordinary_ones(mode, qk_norm, fields):
    ordinary = variation(qk_norm=qk_norm, **fields)
    assert 0.5 * ordinary <= variation(head_embeddings=mode, qk_norm=qk_norm, **fields) <= 2 * ordinary


def test_a_field_that_is_named_says_nothing_of_the_others(tmp_path):
    DCFormerForCausalLM(tiny_config(**LLAMA, head_embeddings="add")).save_pretrained(tmp_path)
    for arguments in ({}, {"key_head_map": None}, {"config": str(tmp_path)}, {"config": tmp_path / "config.json"}):
        assert DCFormerForCausalLM.from_pretrained(tmp_path, **arguments).config.head_embeddings == "add"
    with pytest.raises(ValueError, match="head_embeddings=None does not fit"):
        DCFormerForCausalLM.from_pretrained(tmp_path, head_embeddings=None)


@pytest.mark.parametrize("mode", MODES)
def test_heads_with_small_embeddings_are_alike(mode):
    ordinary = variation()
    assert variation(head_embeddings=mode, head_embedding_init_std=0.02) < 0.1 * ordinary
    assert variation(head_embeddings=mode, head_embedding_init_std=0) == 0


def test_standard_deviation_at_initialization():
    config = tiny_config(**LLAMA, head_embeddings="add", initializer_range=0.1)
    assert embedding_init_std(config, "v_embedding") == pytest.approx(0.1 * math.sqrt(32))
    config.qk_norm = True
    assert [embedding_init_std(config, name) for name in EMBEDDING_NAMES] == [1, 1, pytest.approx(0.1 * math.sqrt(32))]
    for fields, std in (({}, 0.6), ({"head_embedding_init_std": 0.25}, 0.25)):
        torch.manual_seed(0)
        model = DCFormerForCausalLM(tiny_config(**(LLAMA | {"head_dim": 512}), head_embeddings="mul", **fields))
        for name in EMBEDDING_NAMES:
            found = getattr(model.model.layers[0].self_attn, name)
            assert found.std().item() == pytest.approx(std, rel=0.06) and abs(found.mean().item()) < 0.1 * std


def test_embeddings_get_no_weight_decay():
    model = make("mul")
    groups = {group["name"]: group for group in parameter_groups(model, lr=1e-3)}
    vectors = {id(p) for p in groups["vectors"]["params"]}
    assert groups["vectors"]["weight_decay"] == 0 and groups["matrices"]["weight_decay"] > 0
    assert all(id(p) in vectors for name, p in model.named_parameters() if name.endswith(EMBEDDING_NAMES))
    assert sum(len(group["params"]) for group in groups.values()) == len(list(model.parameters()))


def test_the_trainer_decays_no_embeddings():
    pytest.importorskip("trl")
    from dcformer.training.run import _Trainer

    model = make("mul")
    decayed = _Trainer.get_decay_parameter_names(SimpleNamespace(), model)
    assert "model.layers.0.self_attn.q_proj.weight" in decayed and not any(n.endswith(EMBEDDING_NAMES) for n in decayed)


@pytest.mark.parametrize("head", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_other_heads_train(head):
    model_class = getattr(__import__("dcformer"), f"DCFormerFor{head}")
    model = randomize(model_class(tiny_config(**(LLAMA | {"pad_token_id": 0}), head_embeddings="add")))
    output = model(**inputs())
    (output.logits if head != "QuestionAnswering" else output.start_logits).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    assert model.model.layers[0].self_attn.q_embedding.grad.abs().max() > 0


@pytest.mark.parametrize("mode", MODES)
def test_not_causal(mode):
    """Every query sees every key: the layer is the ordinary one with tied weights."""
    attention = layer(mode)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool)
    expected = run(tied(attention), 8, attention_mask=mask)
    torch.testing.assert_close(run(attention, 8, attention_mask=mask), expected, atol=1e-12, rtol=0)
    assert not torch.allclose(expected, run(attention, 8), atol=1e-3)


@pytest.mark.parametrize("mode", MODES)
def test_saved_and_loaded(mode, tmp_path):
    model = make(mode, "windows").float()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.head_embeddings == mode and loaded.config.num_key_value_heads == 1
    assert torch.equal(loaded(**inputs()).logits, model(**inputs()).logits)
    other = "mul" if mode == "add" else "add"
    with pytest.raises(ValueError, match=f"head_embeddings='{other}' does not fit .* trained with '{mode}'"):
        DCFormerForCausalLM.from_pretrained(tmp_path, head_embeddings=other)
    changed = DCFormerConfig.from_pretrained(tmp_path, head_embeddings=other)
    with pytest.raises(ValueError, match="does not fit"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=changed)


def test_a_step_of_decoding_is_exported():
    model, ids = make("add", "windows").float(), torch.randint(0, 97, (1, 12))
    step, cache = export_decoding_step(model, max_cache_len=12).module(), DynamicCache(config=model.config)
    with torch.no_grad():
        for i in range(12):
            token = ids[:, i : i + 1]
            got = step(input_ids=token, cache_position=torch.tensor([i]))
            torch.testing.assert_close(got, model(token, past_key_values=cache).logits, atol=1e-5, rtol=0)


def test_an_ordinary_checkpoint_does_not_become_one(tmp_path):
    DCFormerForCausalLM(tiny_config(**LLAMA)).save_pretrained(tmp_path)
    config = tiny_config(**LLAMA, head_embeddings="add")
    by_name = {"head_embeddings": "add"}
    for arguments in ({"config": config}, by_name, by_name | {"num_key_value_heads": 1}):
        with pytest.raises(ValueError, match="trained from scratch"):
            DCFormerForCausalLM.from_pretrained(tmp_path, **arguments)


def test_a_cache_of_the_other_mode_is_refused():
    add, mul = make("add"), make("mul")
    cache = add(**inputs(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="head_embeddings of the model that filled it is add, of this model mul"):
        mul(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_embeddings": "sum"}, r"head_embeddings='sum' is unknown: expected one of \('add', 'mul'\)"),
        ({"head_embeddings": "add", "num_key_value_heads": 2}, "num_key_value_heads=2 does not go with"),
        ({"head_embeddings": "mul", "key_head_map": [[0] * 4] * 2}, "key_head_map does not go with head_embeddings"),
        ({"head_embeddings": "mul", "head_embedding_init_std": -1.0}, "head_embedding_init_std=-1.0"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**(LLAMA | fields))


def test_implementations_that_do_not_fit_say_so():
    from dcformer.kernels import _unsupported_model

    model = DCFormerForCausalLM(tiny_config(**LLAMA, head_embeddings="add", head_dim=160, partial_rotary_factor=0.75))
    with pytest.raises(ValueError, match=r"up to 256 channels.* = 280"):
        model.set_attn_implementation("flash_attention_2")
    assert "head_embeddings are beyond the fused kernels" in _unsupported_model(model.config)
    with pytest.raises(ValueError, match=r"dcformer_triton.*(head_embeddings|not available here)"):
        model.set_attn_implementation("dcformer_triton")


def test_flash_attention_gets_one_width(monkeypatch):
    """Its function, in the place of which a stand-in computes by the definition, sees values as wide as keys."""
    widths = []

    def stand_in(module, query, key, value, attention_mask, scaling, **options):
        from dcformer.attention_dcformer import eager_attention

        widths.append((query.shape[-1], key.shape[-1], value.shape[-1]))
        return eager_attention(module, query, key, value, attention_mask, scaling, is_causal=True)[0], None

    registry = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(registry._local_mapping, "flash_stand_in", stand_in)
    for mode in MODES:
        model = make(mode)
        ids = inputs()["input_ids"]
        expected = model(ids, use_cache=True).logits
        model.config._attn_implementation = "flash_stand_in"
        got = model(ids, attention_mask={"full_attention": None}, past_key_values=DynamicCache()).logits
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
        assert set(widths) == {(16, 16, 16)}


# --- the study --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_study_resumes(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    arms = {arm: mhe_study.ARMS[arm] for arm in ("MHA", "MHE-Add", "single head")}
    monkeypatch.setattr(mhe_study, "ARMS", arms)
    few = dha_study.held_out_batches()[0][:4]  # measured after every step of so few
    monkeypatch.setattr(dha_study, "held_out_batches", lambda: [few])
    arguments = ["--output", str(tmp_path), "--seeds", "0", "--steps", "10"]
    mhe_study.main(arguments)
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    seeds = [run for run in runs if run["seed"] == 0]
    assert [run["arm"] for run in seeds] == [*mhe_study.ARMS] and (tmp_path / "curves.png").stat().st_size > 10_000
    assert [run["parameters"] for run in seeds] == [32_768, 11_648, 4_096]
    for arm in mhe_study.ARMS:  # the rate that was best with a seed that is not reported
        tried = {run["loss"]: run["lr"] for run in runs if (run["arm"], run["seed"]) == (arm, mhe_study.RATE_SEED)}
        assert {*tried.values()} == {*mhe_study.RATES}
        assert [run["lr"] for run in seeds if run["arm"] == arm] == [tried[min(tried)]]
    assert mhe_study.reported(runs) == seeds
    capsys.readouterr()
    mhe_study.main(arguments)
    printed = capsys.readouterr().out
    assert "12 of 12 runs are in" in printed and "3 of 3 runs are in" in printed
    assert json.loads((tmp_path / "results.json").read_text())["runs"] == runs


@pytest.mark.skipif(not (mhe_study.OUTPUT / "results.json").exists(), reason="the study has not been run")
def test_the_committed_table_is_that_of_its_results():
    runs = json.loads((mhe_study.OUTPUT / "results.json").read_text())["runs"]
    table = (mhe_study.OUTPUT / "table.md").read_text(encoding="utf-8")
    assert table == "<!-- written by examples/mhe_study.py -->\n" + mhe_study.table(runs)
    assert len(mhe_study.reported(runs)) == len(mhe_study.ARMS) * len(mhe_study.SEEDS)
    assert len({run["steps"] for run in runs}) == 1
    assert all(run["curve"][-1] == [run["steps"], run["loss"]] for run in runs)


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_traced_scores_are_the_same_with_a_cache(mode):
    """Also what softmax takes out again, the same number for all keys of a query."""
    model = make(mode, "biases, QK-norm, partial RoPE", compose_pre=True, compose_query=True)
    model.set_attn_implementation("eager")
    ids, traces = inputs()["input_ids"], [ComposeTrace(), ComposeTrace()]
    for trace, use_cache in zip(traces, (False, True), strict=True):
        model(ids, use_cache=use_cache, compose_trace=trace)
    for expected, found in zip(traces[0].layers, traces[1].layers, strict=True):
        for name, maps in vars(expected).items():
            torch.testing.assert_close(getattr(found, name), maps, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
