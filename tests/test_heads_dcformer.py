"""Head maps: which key and value heads the query heads read, in attention, caches and files."""

import pytest
import torch
from helpers import PLAIN, kept_bytes, randomize, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcformer import DCFormerConfig, DCFormerForCausalLM, DHAConfig, DHAForCausalLM
from dcformer.analysis import num_parameters
from dcformer.cache_dcformer import StaticFullLayer, StaticWindowLayer, use_static_layers
from dcformer.cache_report import cache_bytes_per_token, measured_bytes_per_layer
from dcformer.heads_dcformer import HeadMap, matmul_shared

# four query heads; in every layer another number of key heads than of value heads
MAPS = {"key_head_map": [[0, 1, 1, 0], [0, 0, 0, 0]], "value_head_map": [[0, 0, 0, 0], [3, 0, 2, 1]]}
COMPOSED = {name: True for name in PLAIN if name != "compose_static"}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
VARIANTS = {
    "plain": {},
    "composed": COMPOSED,
    "static composition in groups": COMPOSED | {"compose_static": True, "compose_groups": 2, "compose_rank": 1},
    "windows, biases, QK-norm, partial RoPE": {
        "sliding_window": 8,
        "attention_bias": True,
        "qk_norm": True,
        "partial_rotary_factor": 0.5,
    },
    "composed windows": COMPOSED | {"sliding_window": 8},
}


def dha(**fields) -> DHAForCausalLM:
    return randomize(DHAForCausalLM(DHAConfig(**(SIZES | MAPS | fields))))


def without_maps(model: DHAForCausalLM, heads: int | None = None) -> DCFormerForCausalLM:
    """A new model of its fields, with the usual key and value heads."""
    fields = model.config.to_dict() | {"key_head_map": None, "value_head_map": None, "num_key_value_heads": heads}
    fields.pop("model_type")
    return DCFormerForCausalLM(DCFormerConfig(**fields)).to(model.dtype).eval()


def copied(model: DHAForCausalLM) -> DCFormerForCausalLM:
    """The same function with a key and a value head for each query head."""
    config, other, state = model.config, without_maps(model), model.state_dict()
    for name in [name for name in state if ".k_proj." in name or ".v_proj." in name]:
        kind, layer = ("key" if ".k_proj." in name else "value"), int(name.split(".")[2])
        heads = state[name].unflatten(0, (-1, config.head_dim))
        state[name] = heads[getattr(config, f"{kind}_head_map")[layer]].flatten(0, 1)
    other.load_state_dict(state)
    return other


def inputs(length: int = 21) -> dict[str, torch.Tensor]:
    """Two sequences, the first padded on the left."""
    ids = torch.randint(0, 97, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


# --- a map ------------------------------------------------------------------------------------------------------------


@st.composite
def head_maps(draw):
    queries = draw(st.sampled_from([1, 2, 4, 6, 12]))
    count = draw(st.sampled_from([n for n in range(1, queries + 1) if queries % n == 0]))
    return draw(st.permutations([head for head in range(count) for _ in range(queries // count)]))


@given(row=head_maps(), length=st.integers(1, 3))
@settings(deadline=None)
def test_shared_products_are_those_with_copies(row, length):
    heads = HeadMap(row)
    rows = torch.randn(2, len(row), length, 5, dtype=torch.float64)
    shared = torch.randn(2, heads.count, 5, 7, dtype=torch.float64)
    assert torch.equal(heads.gather(shared), shared[:, list(row)])
    torch.testing.assert_close(matmul_shared(rows, shared, heads), rows @ shared[:, list(row)], atol=1e-14, rtol=0)
    assert torch.equal(heads.by_query_head(heads.by_shared_head(rows)), rows)
    behind = heads.by_shared_head(torch.arange(len(row))[None])[0].tolist()
    assert behind == [[q for q in range(len(row)) if row[q] == head] for head in range(heads.count)]  # ascending


def test_counts_of_a_configuration():
    config = DHAConfig(**SIZES, **MAPS)
    assert (config.num_key_heads, config.num_value_heads) == ([2, 1], [1, 4])
    assert config.num_key_value_heads == 4 and config.kv_saving == 1 - 8 / 16
    grouped = tiny_config()
    assert (grouped.num_key_heads, grouped.num_value_heads, grouped.kv_saving) == ([2, 2], [2, 2], 0.0)
    keys_only = tiny_config(key_head_map=[[0, 0, 0, 0]] * 2)
    assert (keys_only.num_key_heads, keys_only.num_value_heads, keys_only.kv_saving) == ([1, 1], [2, 2], 0.25)


def test_fewer_layers_keep_the_first_ones_maps(tmp_path):
    config = DHAConfig(**SIZES, **MAPS)
    config.num_hidden_layers = 1
    assert config.key_head_map == MAPS["key_head_map"][:1] and config.num_value_heads == [1]
    config.num_hidden_layers = 2
    assert config.key_head_map == MAPS["key_head_map"]
    dha().save_pretrained(tmp_path)
    assert DHAConfig.from_pretrained(tmp_path, num_hidden_layers=1).value_head_map == MAPS["value_head_map"][:1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key_head_map": [[0, 1, 1, 0]]}, r"len\(key_head_map\)=1 must equal num_hidden_layers=2"),
        ({"value_head_map": [[0, 1], [0, 1]]}, r"value_head_map\[0\]=\[0, 1\] has 2 entries, num_attention_heads is 4"),
        ({"key_head_map": [[0] * 4, [0, 0, 2, 2]]}, r"key_head_map\[1\]=\[0, 0, 2, 2\] leaves out head 1"),
        ({"key_head_map": [[0] * 4, [0, 0, 4, 4]]}, r"names head 4: expected 0 to num_key_value_heads - 1 = 3"),
        ({"value_head_map": [[-1, 0, 0, 0], [0] * 4]}, r"value_head_map\[0\].*names head -1"),
        ({"value_head_map": [[0, 0, 0, 1], [0] * 4]}, "heads that 1 and heads that 3 query heads read"),
    ],
)
def test_maps_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DHAConfig(**(SIZES | fields))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_same_as_a_model_with_copied_heads(variant, implementation):
    model = dha(**VARIANTS[variant]).double()
    if implementation == "sdpa" and model.config.composes:
        with pytest.raises(ValueError, match="'sdpa' cannot compose attention heads"):
            model.set_attn_implementation(implementation)
        return
    other = copied(model)
    model.set_attn_implementation(implementation)
    batch = inputs()
    visible = batch["attention_mask"].bool()
    output, expected = (m(**batch, labels=batch["input_ids"]) for m in (model, other))
    torch.testing.assert_close(output.logits[visible], expected.logits[visible], atol=1e-12, rtol=0)
    model(**inputs()).logits[visible].square().sum().backward()
    other(**inputs()).logits[visible].square().sum().backward()
    for layer, (mine, theirs) in enumerate(zip(model.model.layers, other.model.layers, strict=True)):
        for kind in ("k", "v"):
            got = getattr(mine.self_attn, f"{kind}_proj").weight.grad.unflatten(0, (-1, 8))
            by_query = getattr(theirs.self_attn, f"{kind}_proj").weight.grad.unflatten(0, (-1, 8))
            row = MAPS["key_head_map" if kind == "k" else "value_head_map"][layer]
            summed = torch.zeros_like(got).index_add_(0, torch.tensor(row), by_query)
            torch.testing.assert_close(got, summed, atol=1e-11, rtol=1e-11)


@torch.no_grad()  # PyTorch has no backward pass of it on a CPU
def test_flex_attention_is_allowed_without_composition():
    model = dha()
    expected = model(**inputs()).logits
    model.set_attn_implementation("flex_attention")
    visible = inputs()["attention_mask"].bool()
    torch.testing.assert_close(model(**inputs()).logits[visible], expected[visible], atol=1e-5, rtol=0)


def test_stock_attention_never_repeats_or_pairs_heads_again(monkeypatch):
    """Transformers' functions see a key and a value head for each query head, and no groups."""
    seen = []
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(module, query, key, value, *args, **kwargs):
        seen.append((module.num_key_value_groups, query.shape[1], key.shape[1], value.shape[1]))
        return stock(module, query, key, value, *args, **kwargs)

    model = dha()
    model.set_attn_implementation("sdpa")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", spy)
    model(**inputs())
    assert seen == [(1, 4, 4, 4)] * 2
    seen.clear()
    even = dha(key_head_map=[[0, 0, 1, 1]] * 2, value_head_map=[[0, 0, 1, 1]] * 2)  # that is grouped-query attention
    even.set_attn_implementation("sdpa")
    even(**inputs())
    assert seen == [(2, 4, 2, 2)] * 2


def test_consecutive_groups_are_llamas():
    """Names and numbers of `LlamaForCausalLM` with `num_key_value_heads`."""
    model = dha(key_head_map=[[0, 0, 1, 1]] * 2, value_head_map=[[0, 0, 1, 1]] * 2)
    config = LlamaConfig(**SIZES, num_key_value_heads=2, rms_norm_eps=model.config.norm_eps)
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(**inputs()).logits, llama(**inputs()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("variant", "implementation"),
    [
        *(("plain", implementation) for implementation in (None, "eager", "dcformer_chunked", "sdpa")),
        *(("composed", implementation) for implementation in (None, "eager", "dcformer_chunked")),
    ],
)
def test_consecutive_groups_keep_no_more_than_grouped_queries(variant, implementation):
    """Of keys and values, for the backward pass; and the numbers are those of `num_key_value_heads`."""
    model = dha(**VARIANTS[variant], key_head_map=[[0, 0, 1, 1]] * 2, value_head_map=[[0, 0, 1, 1]] * 2)
    grouped = without_maps(model, heads=2)
    grouped.load_state_dict(model.state_dict())
    ids, kept, losses = inputs()["input_ids"], [], []
    for each in (model, grouped):
        if implementation is not None:
            each.set_attn_implementation(implementation)
        kept.append(kept_bytes(each, lambda each=each: losses.append(each(ids, labels=ids, use_cache=False).loss)))
    assert torch.equal(*losses) and kept[0] == kept[1]


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_decoding_in_every_cache_gives_the_tokens_of_one_pass(variant, implementation):
    model = dha(**VARIANTS[variant]).double()
    model.set_attn_implementation(implementation)
    batch = inputs()
    options = {"max_new_tokens": 12, "do_sample": False}
    tokens = model.generate(**batch, **options)
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 12, dtype=torch.long)], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # of the tokens, as generate counts them
    logits = model(tokens, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(logits[:, 20:-1].argmax(-1), tokens[:, 21:])
    for cache in ("static", "dynamic"):
        assert torch.equal(model.generate(**batch, **options, cache_implementation=cache), tokens), cache
    assert torch.equal(model.generate(**batch, **options, cache_implementation="static"), tokens)  # used again
    without = model.generate(**batch, **options, use_cache=False)
    assert torch.equal(without, tokens)


def test_beams_and_assisted_decoding():
    model = dha().double()
    batch = inputs()
    options = {"max_new_tokens": 8, "do_sample": False}
    beams = model.generate(**batch, **options, num_beams=3)
    assert torch.equal(beams, model.generate(**batch, **options, num_beams=3, use_cache=False))
    assert torch.equal(beams, model.generate(**batch, **options, num_beams=3, cache_implementation="static"))
    one = {name: tensor[1:] for name, tensor in batch.items()}
    draft = dha(num_hidden_layers=1, **{name: rows[:1] for name, rows in MAPS.items()}).double()
    tokens = model.generate(**one, **options)
    assert torch.equal(model.generate(**one, **options, assistant_model=draft), tokens)
    assert torch.equal(model.generate(**one, **options, prompt_lookup_num_tokens=3), tokens)


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_of_a_cache(variant):
    model, length = dha(**VARIANTS[variant]), 7  # within the window
    config, cache = model.config, DynamicCache()
    model(torch.ones(1, length, dtype=torch.long), past_key_values=cache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    plain, composed = cache_bytes_per_token(config, torch.float32)
    assert held == length * composed
    assert plain == 4 * config.head_dim * sum(config.num_key_heads + config.num_value_heads)
    assert composed == sum(measured_bytes_per_layer(config, torch.float32, layer) for layer in range(2))
    if not config.composes:
        half = DynamicCache()
        model.to(torch.bfloat16)(torch.ones(1, length, dtype=torch.long), past_key_values=half)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in half.layers)
        assert held == 2 * length * 8 * sum(config.num_key_heads + config.num_value_heads) and plain == composed


def test_channels_of_composition_are_those_of_the_query_heads_behind_a_head():
    """At H = 32, D = 128, R = 2 composition leaves 29.7 % of a plain cache at 25 % of the heads, 56.3 % at 50 %."""
    for count, share, of_its_own in ((8, 0.297, 0.279), (16, 0.563, None)):
        row = [head * count // 32 for head in range(32)]
        sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 1, "sliding_window": None}
        config = DCFormerConfig(**sizes, key_head_map=[row], value_head_map=[row])
        _, composed = cache_bytes_per_token(config)
        plain, full = cache_bytes_per_token(DCFormerConfig(**sizes))
        assert composed / plain == pytest.approx(share, abs=6e-4)
        assert of_its_own is None or composed / full == pytest.approx(of_its_own, abs=6e-4)
    assert [config.compose_cache_channels(stage) for stage in ("pre", "post")] == [16, 16]  # 2 heads of 5 numbers
    widths = tiny_config(**MAPS, num_key_value_heads=4)
    found = [[widths.compose_cache_channels(stage, layer) for stage in ("pre", "post")] for layer in range(2)]
    assert found == [[16, 24], [24, 8]]  # 2 and 4, 4 and 1 query heads behind each


def test_a_static_cache_of_the_librarys_is_refused():
    model = dha(layer_types=["full_attention", "sliding_attention"], sliding_window=8)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with pytest.raises(ValueError, match=r"layer 0, which has 2 key and 1 value heads.*use_static_layers"):
        model(**inputs(10), past_key_values=cache)
    cache = StaticCache(config=model.config, max_cache_len=20)
    use_static_layers(cache, model.config.sliding_window)
    assert [type(layer) for layer in cache.layers] == [StaticFullLayer, StaticWindowLayer]
    expected = model(**inputs(10)).logits
    torch.testing.assert_close(model(**inputs(10), past_key_values=cache).logits, expected, atol=1e-5, rtol=0)
    assert [(layer.keys.shape[1], layer.values.shape[1]) for layer in cache.layers] == [(2, 1), (1, 4)]


def test_a_cache_of_another_map_is_refused():
    model, other = dha(), dha(key_head_map=[[0, 1, 0, 1], [0, 0, 0, 0]])  # of the same shapes
    cache = model(**inputs(10), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"key_head_map"):
        other(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)


def test_early_allocation_only_where_all_parts_are_alike():
    assert dha()._get_static_cache_init_shape() is None
    alike = dha(key_head_map=[[0, 1, 0, 1]] * 2, value_head_map=[[1, 0, 0, 1]] * 2)
    assert alike._get_static_cache_init_shape() == (2, 8)
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static", "prefill_chunk_size": 8}
    for model in (dha(), alike):
        batch = {name: tensor[1:] for name, tensor in inputs(16).items()}
        expected = model.generate(**batch, max_new_tokens=4, do_sample=False)
        assert torch.equal(model.generate(**batch, **options), expected)


def test_decoding_reads_the_cache_where_it_is(monkeypatch):
    """No copy of keys or values per query head, and none of the cache, at a step of decoding."""
    monkeypatch.setattr(HeadMap, "gather", lambda *_: pytest.fail("a step of decoding copies the cache"))
    for implementation in ("eager", "dcformer_chunked"):
        model = dha()
        model.set_attn_implementation(implementation)
        cache = model(**inputs(10), use_cache=True).past_key_values
        model(torch.ones(2, 1, dtype=torch.long), past_key_values=cache)


@pytest.mark.parametrize("variant", ["plain", "composed"])
def test_saved_and_loaded(variant, tmp_path):
    model = dha(**VARIANTS[variant])
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is DHAForCausalLM and loaded.config.key_head_map == MAPS["key_head_map"]
    assert torch.equal(loaded(**inputs()).logits, model(**inputs()).logits)
    tokens = model.generate(**inputs(), max_new_tokens=5, do_sample=False)
    assert torch.equal(loaded.generate(**inputs(), max_new_tokens=5, do_sample=False), tokens)
    config = DHAConfig.from_pretrained(tmp_path, key_head_map=None, value_head_map=None)
    # Without its maps it is another model.
    with pytest.raises(ValueError, match="key_head_map gives the layers the usual heads"):
        DHAForCausalLM.from_pretrained(tmp_path, config=config)


@pytest.mark.parametrize("queries", [1, 4])
def test_one_layer_and_the_widest_difference(queries):
    """One key head beside a value head for each query head."""
    row = list(range(queries))
    fields = {"num_hidden_layers": 1, "num_attention_heads": queries, "head_dim": 8}
    model = dha(**fields, key_head_map=[[0] * queries], value_head_map=[row[::-1]]).double()
    other = copied(model)
    torch.testing.assert_close(model(**inputs()).logits, other(**inputs()).logits, atol=1e-12, rtol=0)
    tokens = model.generate(**inputs(), max_new_tokens=5, do_sample=False)
    assert torch.equal(tokens, other.generate(**inputs(), max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("variant", VARIANTS)
def test_counted_parameters(variant):
    model = dha(**VARIANTS[variant])
    assert num_parameters(model.config) == sum(parameter.numel() for parameter in model.parameters())


def test_triton_says_that_it_has_no_maps():
    with pytest.raises(ValueError, match=r"dcformer_triton.*(key_head_map|not available here)"):
        dha(**COMPOSED).set_attn_implementation("dcformer_triton")
    from dcformer.kernels import _unsupported_model

    assert "key_head_map" in _unsupported_model(DHAConfig(**SIZES, **MAPS))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (MAPS, "this model has head maps"),
        (MAPS | COMPOSED, "carry composition weights"),
        ({"head_embeddings": "mul"}, r"\(head_embeddings\) are 16 wide"),
    ],
)
def test_continuous_batching_is_refused(fields, reason):
    model = DHAForCausalLM(DHAConfig(**(SIZES | fields)))
    with pytest.raises(NotImplementedError, match=rf"continuous batching: .*{reason}"):
        model.init_continuous_batching()


@pytest.mark.parametrize("fields", [{}, COMPOSED], ids=["plain", "composed"])
def test_functional_calls_leave_the_model_alone(fields):
    """Buffers of the maps have one name each: what a call is given is taken back afterwards."""
    models = [dha(**fields), dha(**fields)]
    for network in models:
        network.set_attn_implementation("eager")
    ids = torch.randint(97, (2, 9))
    expected = torch.stack([network(ids, use_cache=False).logits for network in models])
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (ids,), {"use_cache": False}).logits

    together = torch.func.vmap(call)(parameters, buffers)
    torch.testing.assert_close(together, expected)
    turned = {name: buffer[1].flip(0) if buffer[1].dim() else buffer[1] for name, buffer in buffers.items()}
    call({name: parameter[1] for name, parameter in parameters.items()}, turned)
    assert torch.equal(models[0](ids, use_cache=False).logits, expected[0])
