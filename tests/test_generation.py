"""Generation through the library: every way of decoding gives the tokens of decoding without a cache."""

import copy
import functools
import gc
import importlib.util
import re
import shutil
import weakref

import pytest
import torch
from helpers import randomize, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CLIPVisionConfig,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    QuantizedCache,
    StaticCache,
)
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcformer import ComposeTrace, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM, modeling_dcformer
from dcformer.cache_dcformer import CACHE_NAME, StaticWindowLayer

IMPLEMENTATIONS = ("eager", "dcformer_chunked")
WINDOW = 8
NEW_TOKENS = 12
PROMPT_LENGTHS = (5, 60, 7, 23)  # shorter than the window, and far longer

CONFIGS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "groups": {"num_key_value_heads": 4, "compose_groups": 2},
    "static-projection": {"compose_static": True},
    "query-wise": {"compose_key": False},
    "pre-only": {"compose_post": False},
    "gates-only": {"compose_projection": False},
    "global": {"sliding_window": None},
    "dcpythia": None,
}

# The ways `generate` keeps and fills its cache. All must give the tokens of decoding without one.
MODES = {
    "no cache": {"use_cache": False},
    "default": {},
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "static, larger": {"cache_implementation": "static", "max_cache_len": 100},
    "chunked prefill": {"prefill_chunk_size": 7},
    "chunked prefill, static": {"prefill_chunk_size": 7, "cache_implementation": "static"},
    "large chunks, static": {"prefill_chunk_size": 25, "cache_implementation": "static"},
}


def make_config(name: str):
    if name == "dcpythia":
        return DCPythiaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            head_dim=8,
            sliding_window=WINDOW,
            max_position_embeddings=128,
        )
    return tiny_config(**CONFIGS[name])


def make_model(config, implementation: str = "dcformer_chunked", seed: int = 0):
    """A model whose attention and composition matter, so that a wrong cache shows in the tokens."""
    torch.manual_seed(seed)
    model_class = DCPythiaForCausalLM if isinstance(config, DCPythiaConfig) else DCFormerForCausalLM
    scale = 1.5 if isinstance(config, DCPythiaConfig) else 1.0
    return randomize(model_class._from_config(config, attn_implementation=implementation), scale=scale)


@functools.cache
def model_named(name: str, implementation: str = "dcformer_chunked"):
    return make_model(make_config(name), implementation)


@functools.cache
def prompts() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(1, 97, (length,), generator=generator) for length in PROMPT_LENGTHS)


def tokens(length: int, batch: int = 1, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch [B, longest] and its attention mask."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, longest - len(row) :], mask[i, longest - len(row) :] = row, 1
    return ids, mask


@torch.no_grad()
def greedy(model, ids: torch.Tensor, count: int = NEW_TOKENS) -> torch.Tensor:
    """The reference: [B, T] -> [B, T + count], every step a forward pass over the whole sequence."""
    for _ in range(count):
        logits = model(ids, use_cache=False).logits  # [B, T, V]
        ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids


@functools.cache
def expected(name: str) -> tuple[torch.Tensor, ...]:
    """What each prompt continues with, by the definition of attention and without a cache: [NEW_TOKENS] each."""
    model = model_named(name, "eager")
    return tuple(greedy(model, prompt[None])[0, len(prompt) :] for prompt in prompts())


def generate(model, ids: torch.Tensor, mask: torch.Tensor | None = None, **options):
    """`model.generate` without sampling or an end token; the new tokens [B, NEW_TOKENS] unless a dict is asked for."""
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0} | options
    output = model.generate(ids, attention_mask=mask, **options)
    return output if isinstance(output, dict) else output[:, ids.shape[1] :]


# --- the same tokens, however they are made ---------------------------------------------------------------------------


@torch.no_grad()
def test_the_models_are_no_trivial_ones():
    """Varied tokens, and logits that depend on what rides in the cache and on the window; or equality says little."""
    for name in CONFIGS:
        assert all(len(set(row.tolist())) > 3 for row in expected(name)), name
    ids, model = prompts()[1][None], model_named("mha")
    exact = model(ids, use_cache=False).logits[:, -1]
    for states in ("keys", "values"):
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], past_key_values=cache)
        for layer in cache.layers:
            getattr(layer, states)[..., model.config.head_dim :] = 0.0
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        assert (logits - exact).abs().max() > 0.05 * exact.std(), states
    other = make_model(tiny_config(num_key_value_heads=4, sliding_window=2 * WINDOW))
    other.load_state_dict(model.state_dict())
    assert (other(ids).logits[:, -1] - exact).abs().max() > 0.05 * exact.std()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_single_and_batched(name, mode):
    """Batched with left padding, short and long prompts together, and one by one."""
    model = model_named(name)
    ids, mask = left_padded(prompts())
    torch.testing.assert_close(generate(model, ids, mask, **MODES[mode]), torch.stack(expected(name)))
    for prompt, want in zip(prompts(), expected(name), strict=True):
        torch.testing.assert_close(generate(model, prompt[None], **MODES[mode])[0], want)


@pytest.mark.parametrize("mode", MODES)
def test_greedy_with_eager_attention(mode):
    ids, mask = left_padded(prompts())
    out = generate(model_named("gqa", "eager"), ids, mask, **MODES[mode])
    torch.testing.assert_close(out, torch.stack(expected("gqa")))


@pytest.mark.parametrize("implementation", ALL_CACHE_IMPLEMENTATIONS)
def test_every_cache_implementation_of_the_library(implementation):
    """Whatever this version of the library lists; those with requirements have tests of their own."""
    if "offloaded" in implementation and not torch.cuda.is_available():
        pytest.skip(f"the library's {implementation!r} cache needs CUDA streams (torch.cuda.default_stream)")
    if implementation == "quantized":
        pytest.skip("lossy, and refuses sliding layers: test_quantized_cache and its neighbors")
    device = "cuda" if "offloaded" in implementation else "cpu"
    model = copy.deepcopy(model_named("gqa")).to(device)
    ids, mask = (tensor.to(device) for tensor in left_padded(prompts()))
    out = generate(model, ids, mask, cache_implementation=implementation, disable_compile=True)
    torch.testing.assert_close(out.cpu(), torch.stack(expected("gqa")))


class _NoStream:
    """Stands in for a CUDA stream."""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        return None

    def wait_stream(self, other):
        pass


@pytest.mark.parametrize("prefill", [None, 25])
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_bookkeeping_on_a_cpu(implementation, prefill, monkeypatch):
    """Everything of the offloaded caches but the copies between devices, and so their streams."""
    monkeypatch.setattr(torch, "Stream", _NoStream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: _NoStream())
    ids, mask = left_padded(prompts())
    options = {"cache_implementation": implementation, "prefill_chunk_size": prefill}
    torch.testing.assert_close(generate(model_named("gqa"), ids, mask, **options), torch.stack(expected("gqa")))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: offloading copies between devices")
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_with_chunked_prefill(implementation):
    model = copy.deepcopy(model_named("gqa")).cuda()
    ids, mask = (tensor.cuda() for tensor in left_padded(prompts()))
    options = {"cache_implementation": implementation, "prefill_chunk_size": 25, "disable_compile": True}
    torch.testing.assert_close(generate(model, ids, mask, **options).cpu(), torch.stack(expected("gqa")))


@pytest.mark.parametrize("name", ["gqa", "groups", "dcpythia"])
def test_sampling(name):
    """One seed, one continuation, with and without a cache."""
    model = model_named(name)
    ids, mask = left_padded(prompts())
    outputs = []
    for options in ({"use_cache": False}, {}, {"cache_implementation": "static"}, {"prefill_chunk_size": 9}):
        torch.manual_seed(11)
        outputs.append(generate(model, ids, mask, do_sample=True, top_k=0, temperature=1.5, **options))
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    torch.manual_seed(12)
    assert not torch.equal(generate(model, ids, mask, do_sample=True, top_k=0, temperature=1.5), outputs[0])


@pytest.mark.parametrize("sampled", [False, True], ids=["beam", "beam-sample"])
@pytest.mark.parametrize("name", ["gqa", "groups", "dcpythia"])
def test_beam_search(name, sampled):
    """Beams copy and reorder the cache at every step."""
    model = model_named(name)
    ids, mask = left_padded(prompts())
    outputs = []
    for options in ({"use_cache": False}, {}, {"cache_implementation": "static"}):
        torch.manual_seed(11)
        outputs.append(generate(model, ids, mask, num_beams=3, num_return_sequences=2, do_sample=sampled, **options))
    assert outputs[0].shape == (2 * len(PROMPT_LENGTHS), NEW_TOKENS)
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])
    if not sampled:
        single = generate(model, prompts()[0][None], num_beams=3, num_return_sequences=2)
        torch.testing.assert_close(single, outputs[0][:2])
        assert not torch.equal(outputs[0][::2], torch.stack(expected(name)))  # or it would be greedy decoding again


@pytest.mark.parametrize("prefill", [None, 7])
@pytest.mark.parametrize("name", CONFIGS)
def test_prompt_lookup(name, prefill):
    """Several tokens are verified at once and the rejected ones cropped from the cache, past the window too."""
    model = model_named(name)
    ids = tokens(12).repeat(1, 4)  # repetition, so that there is something to look up
    out = generate(model, ids, prompt_lookup_num_tokens=5, prefill_chunk_size=prefill)
    torch.testing.assert_close(out, greedy(model, ids)[:, ids.shape[1] :])
    for prompt, want in zip(prompts(), expected(name), strict=True):
        out = generate(model, prompt[None], prompt_lookup_num_tokens=3, prefill_chunk_size=prefill)
        torch.testing.assert_close(out[0], want)


@pytest.mark.parametrize("assistant", ["itself", "smaller", "early exit"])
@pytest.mark.parametrize("name", ["gqa", "groups", "query-wise", "dcpythia"])
def test_assisted_decoding(name, assistant):
    model = model_named(name)
    options = {"assistant_early_exit": 1}
    if assistant == "itself":
        options = {"assistant_model": make_model(make_config(name))}
    elif assistant == "smaller":
        options = {"assistant_model": make_model(tiny_config(num_hidden_layers=1, hidden_size=16), seed=4)}
    for prompt, want in zip(prompts(), expected(name), strict=True):
        torch.testing.assert_close(generate(model, prompt[None], **options)[0], want)
    assert model.config.num_hidden_layers == 2


def test_drafting_with_fewer_layers_leaves_the_model_its_layers():
    """However it ends: the library would leave the number as it is while drafting. And nothing holds the model then."""
    model, ids = make_model(make_config("gqa")), prompts()[0][None]

    def interrupted(input_ids, scores):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, ids, assistant_early_exit=1, logits_processor=[interrupted])
    assert model.config.num_hidden_layers == 2
    for number in (-1, 0, 3):
        with pytest.raises(ValueError, match=f"assistant_early_exit={number}: expected .* 1 to 2"):
            generate(model, ids, assistant_early_exit=number)
    torch.testing.assert_close(generate(model, ids)[0], expected("gqa")[0])
    gc.collect()
    gc.disable()
    try:
        generate(model, ids, assistant_early_exit=1)
        held = weakref.ref(model)
        del model
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}], ids=str)
def test_assisted_decoding_on_a_filled_cache_is_refused(kind):
    """The library would give it the tokens that it holds once more."""
    model, cache = model_named("gqa"), DynamicCache(config=make_config("gqa"))
    ids = prompts()[0][None]
    first = model.generate(ids, past_key_values=cache, **kind)
    longer = torch.cat([first, ids], dim=1)
    with pytest.raises(ValueError, match=rf"{CACHE_NAME} already holds \d+ tokens"):
        model.generate(longer, past_key_values=cache, **kind)
    torch.testing.assert_close(model.generate(longer, **kind), model.generate(longer, past_key_values=cache))


@pytest.mark.parametrize(
    "kind", [{"prompt_lookup_num_tokens": 3}, {"assistant_early_exit": 1}, {"assistant_model": True}], ids=str
)
@pytest.mark.parametrize("name", ["gqa", "no window"])
def test_assisted_decoding_with_a_static_cache_is_refused(name, kind):
    """By the library up to 5.23; a later one lets drafts run over the end of the cache, and windows forget."""
    model = model_named("gqa") if name == "gqa" else make_model(tiny_config(num_hidden_layers=2, sliding_window=None))
    options = {name: model if value is True else value for name, value in kind.items()}
    with pytest.raises(ValueError, match=r"(?i)static cache"):
        generate(model, prompts()[0][None], cache_implementation="static", **options)


def test_an_assistant_with_a_static_cache_is_refused():
    model, assistant = model_named("gqa"), make_model(tiny_config(num_hidden_layers=1))
    assistant.generation_config.cache_implementation = "static"
    with pytest.raises(ValueError, match="the assistant's generation_config has cache_implementation='static'"):
        generate(model, prompts()[0][None], assistant_model=assistant)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("kind", [DynamicCache, StaticCache], ids=lambda kind: kind.__name__)
def test_a_mask_that_ends_before_the_tokens_is_refused(kind, implementation):
    """As that of a second turn alone."""
    model, ids = make_model(tiny_config(sliding_window=5)), tokens(12)
    model.set_attn_implementation(implementation)
    options = {"max_cache_len": 20} if kind is StaticCache else {}
    cache, turn = kind(config=model.config, **options), torch.ones(1, 4, dtype=torch.long)
    model(ids[:, :8], past_key_values=cache)
    with pytest.raises(ValueError, match=rf"attention_mask of 4 columns is too short: {CACHE_NAME} holds 8 tokens"):
        model(ids[:, 8:], attention_mask=turn, past_key_values=cache)
    whole = model(ids, use_cache=False).logits[:, 8:]
    found = model(ids[:, 8:], attention_mask=torch.ones(1, 12, dtype=torch.long), past_key_values=cache).logits
    torch.testing.assert_close(found, whole)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache], ids=lambda kind: kind.__name__)
def test_columns_that_a_mask_lacks_are_hidden_by_all_implementations(kind, monkeypatch):
    """Where nobody looks, as in graphs."""
    monkeypatch.setattr(modeling_dcformer, "check_mask_length", lambda *given: None)
    model, ids, found = make_model(tiny_config(sliding_window=5)), tokens(12), []
    for implementation in ("eager", "dcformer_chunked"):
        model.set_attn_implementation(implementation)
        cache = kind(config=model.config, **({"max_cache_len": 20} if kind is StaticCache else {}))
        model(ids[:, :8], past_key_values=cache)
        found.append(model(ids[:, 8:], attention_mask=torch.ones(1, 6).long(), past_key_values=cache).logits)
    torch.testing.assert_close(*found)


def test_assistant_that_is_the_model_itself_is_believed():
    """A draft by the same weights is never rejected: fewer forward passes than tokens."""
    model, assistant = model_named("gqa"), make_model(make_config("gqa"))
    assistant.generation_config.num_assistant_tokens = 5
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    lengths = _record_lengths(model, "model")
    out = generate(model, prompts()[1][None], assistant_model=assistant)
    torch.testing.assert_close(out[0], expected("gqa")[1])
    assert len(lengths()) <= 4, lengths()


@pytest.mark.parametrize("name", CONFIGS)
def test_continue_from_past_key_values(name):
    """A conversation: generate, append a turn, generate again from the returned cache."""
    model = model_named(name)
    ids = prompts()[3][None]
    first = generate(model, ids, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(9, seed=8)], dim=1)
    lengths = _record_lengths(model, "model")
    again = generate(model, turn, past_key_values=first.past_key_values)
    ran = lengths()
    torch.testing.assert_close(again, greedy(model, turn)[:, turn.shape[1] :])
    assert ran[0] == 1 + 9  # the last generated token was never fed; everything before it was not fed again
    assert ran[1:] == [1] * (NEW_TOKENS - 1)


@pytest.mark.parametrize("kind", ["dynamic", "static", "unconfigured"])
def test_continue_a_batch(kind):
    """The same with left padding, with caches of the user's own, and a second prefill in chunks."""
    model = model_named("gqa")
    ids, mask = left_padded(prompts())
    cache = _make_cache(kind, model.config, 120)
    first = generate(model, ids, mask, past_key_values=cache, return_dict_in_generate=True)
    turn = torch.cat([first.sequences, tokens(9, batch=4, seed=8)], dim=1)
    turn_mask = torch.cat([mask, torch.ones(4, NEW_TOKENS + 9, dtype=torch.long)], dim=1)
    again = generate(model, turn, turn_mask, past_key_values=cache, prefill_chunk_size=4)
    for i, length in enumerate(PROMPT_LENGTHS):
        row = turn[i : i + 1, turn.shape[1] - length - NEW_TOKENS - 9 :]  # without its padding
        torch.testing.assert_close(again[i : i + 1], greedy(model, row)[:, row.shape[1] :])


@pytest.mark.parametrize("cache", [{}, {"use_cache": False}, {"cache_implementation": "static"}], ids=str)
def test_a_trace_collects_the_maps_of_every_step(cache):
    model, ids, trace, whole = model_named("gqa", "eager"), prompts()[3][None], ComposeTrace(), ComposeTrace()
    plain = generate(model, ids)
    new = generate(model, ids, compose_trace=trace, **cache)
    assert torch.equal(new, plain)
    with torch.no_grad():
        model(torch.cat([ids, new], dim=1), use_cache=False, compose_trace=whole)
    assert len(trace.layers) == NEW_TOKENS * 2
    for step in range(NEW_TOKENS):
        stop = ids.shape[1] + step  # tokens so far
        for i, kind in enumerate(model.config.layer_types):
            held = trace.layers[step * 2 + i].composed_weights  # [B, H, T, S]
            expected = whole.layers[i].composed_weights[:, :, stop - held.shape[2] : stop, :stop]
            if kind == "sliding_attention" and held.shape[-1] == WINDOW:  # the cache holds no more
                expected = expected[..., -WINDOW:]
            torch.testing.assert_close(held[..., : expected.shape[-1]], expected, rtol=1e-4, atol=1e-5)
            assert not held[..., expected.shape[-1] :].any()  # places of a static cache that are still empty


@pytest.mark.parametrize("drafts", ["assistant", "early exit"])
def test_a_trace_holds_no_drafts(drafts):
    """Those of another model, with other heads and without maps, and those of the first layer of this one."""
    config = make_config("gqa")
    model, ids, trace, calls = make_model(config, "eager"), prompts()[3][None], ComposeTrace(), []
    expected = greedy(model, ids)[:, ids.shape[1] :]
    wider = copy.deepcopy(config)
    wider.update({"num_attention_heads": 8, "head_dim": config.head_dim})
    by = {"assistant_model": make_model(wider)} if drafts == "assistant" else {"assistant_early_exit": 1}
    model.model.layers[-1].register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(generate(model, ids, compose_trace=trace, **by), expected)
    assert len(trace.layers) == 2 * len(calls) > 0
    assert {layer.composed_weights.shape[1] for layer in trace.layers} == {config.num_attention_heads}


@pytest.mark.parametrize("implementation", ["dcformer_chunked", "dcformer_triton"])
def test_maps_of_what_never_holds_them(implementation, monkeypatch):
    """An error of `generate`; in a forward pass a warning and an empty tuple, as Transformers' own tests want it."""
    if implementation not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        pytest.skip("Triton is not installed")
    model, ids = make_model(make_config("gqa")), prompts()[0][None]
    message = rf"output_attentions=True.*{implementation}.*attn_implementation='eager'"
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=message):
        generate(model, ids, **asked)
    with pytest.raises(ValueError, match=r"compose_trace.*'eager'"):
        generate(model, ids, compose_trace=ComposeTrace())
    model.set_attn_implementation(None)
    with pytest.raises(ValueError, match=r"which the default \(attn_implementation unset\) never holds"):
        generate(model, ids, **asked)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    assert len(model(ids).attentions) == 2
    assert len(generate(model, ids, **asked).attentions[0]) == 2

    warned = []
    monkeypatch.setattr(modeling_dcformer.logger, "warning_once", warned.append)
    model.set_attn_implementation("dcformer_chunked")  # and the configuration still asks for them
    assert model(ids).attentions == ()
    assert model(ids, output_attentions=False).attentions is None
    assert len(warned) == 1 and re.search(r"output_attentions=True.*dcformer_chunked.*'eager'", warned[0])


def test_modes_that_left_the_library():
    """Their code is fetched from the Hub now; if one came back, it belongs above."""
    left = {"CONTRASTIVE_SEARCH", "DOLA_GENERATION", "GROUP_BEAM_SEARCH", "CONSTRAINED_BEAM_SEARCH"}
    assert {mode.name for mode, method in GENERATION_MODES_MAPPING.items() if "/" in method} == left


# --- quantized --------------------------------------------------------------------------------------------------------


def test_quantized_cache_refuses_sliding_layers():
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    with pytest.raises(ValueError, match=r"only full attention layers.*sliding_attention"):
        generate(model_named("gqa"), prompts()[0][None], **options)


@torch.no_grad()
def test_quantized_cache():
    """Composition's channels are quantized with the keys and values. Lossy, so equal tokens are not to be had.

    The yardstick is what rounding keys and values alone does to the same model.
    """
    model = randomize(DCFormerForCausalLM(tiny_config(sliding_window=None)))
    d, ids = model.config.head_dim, tokens(60, batch=4)
    exact = model(ids, use_cache=False).logits[:, -1]

    def loss(cache):
        logits = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        return float((logits - exact).std() / exact.std())

    quantized = QuantizedCache(backend="fp8", config=model.config)
    yardstick = DynamicCache(config=model.config)
    for cache in (quantized, yardstick):
        model(ids[:, :-1], past_key_values=cache)
    for layer in yardstick.layers:
        for states in (layer.keys, layer.values):
            scale = states.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
            states[..., :d] = (states[..., :d] / scale).to(torch.float8_e4m3fn).float() * scale
    assert 1e-4 < loss(quantized) < 2 * loss(yardstick)

    padded, mask = left_padded(prompts())
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    first = torch.stack([greedy(model, prompt[None], 1)[0, -1] for prompt in prompts()])
    assert torch.equal(generate(model, padded, mask, **options)[:, 0], first)  # by the prefill, from exact keys
    assert generate(model, padded, mask, num_beams=3, **options).shape == (4, NEW_TOKENS)


@pytest.mark.parametrize(("backend", "package"), [("quanto", "optimum.quanto"), ("hqq", "hqq")])
def test_quantized_backends_with_requirements(backend, package):
    if importlib.util.find_spec(package.partition(".")[0]):
        pytest.skip(f"{package} is installed; this is about what is said when it is not")
    with pytest.raises(ImportError, match=rf"(?i){package.replace('.', '-')}"):
        QuantizedCache(backend=backend, config=tiny_config(sliding_window=None))


# --- logits position by position --------------------------------------------------------------------------------------


def _make_cache(kind: str, config, length: int):
    if kind == "static":
        return StaticCache(config=config, max_cache_len=length)
    return DynamicCache(config=config) if kind == "dynamic" else DynamicCache()


def _pieces(plan: str, length: int) -> list[int]:
    """Lengths of the pieces in which a sequence is fed."""
    if plan == "tokens":
        return [1] * length
    if plan == "one shot, then tokens":
        return [length - 40] + [1] * 40
    sizes, given = [], 0
    for size in (3, 5, 1, 17, 7, 1, 1, 31, 13, 2) * length:
        sizes.append(min(size, length - given))
        given += sizes[-1]
        if given == length:
            return sizes
    raise AssertionError


@pytest.mark.parametrize("plan", ["one shot, then tokens", "odd chunks", "tokens"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "unconfigured"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["gqa", "groups", "dcpythia"])
def test_logits_at_every_position(name, implementation, kind, plan):
    """100 tokens through a window of 8: whatever way they come in, the logits of the forward pass without a cache."""
    model = model_named(name, implementation)
    ids = tokens(100, batch=2)
    with torch.no_grad():
        want = model_named(name, "eager")(ids, use_cache=False).logits  # [B, T, V]
        cache, outputs = _make_cache(kind, model.config, 100), []
        for piece in ids.split(_pieces(plan, 100), dim=1):
            outputs.append(model(piece, past_key_values=cache, use_cache=True).logits)
    assert want.std() > 0.5  # against which 1e-4 means something
    torch.testing.assert_close(torch.cat(outputs, dim=1), want, rtol=0, atol=1e-4)
    assert int(cache.get_seq_length()) == 100


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_logits_at_every_position_with_left_padding(kind):
    model = model_named("gqa")
    rows = [tokens(100, seed=5)[0], tokens(41, seed=6)[0], tokens(6, seed=7)[0]]
    ids, mask = left_padded(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, outputs, start = _make_cache(kind, model.config, 100), [], 0
    with torch.no_grad():
        for size in _pieces("odd chunks", 100):
            at = slice(start, start + size)
            outputs.append(
                model(
                    ids[:, at],
                    attention_mask=mask[:, : at.stop],
                    position_ids=positions[:, at],
                    past_key_values=cache,
                    use_cache=True,
                ).logits
            )
            start += size
        logits = torch.cat(outputs, dim=1)
        for i, row in enumerate(rows):
            want = model(row[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[i, 100 - len(row) :], want, rtol=0, atol=1e-4)


# --- compiled decoding ------------------------------------------------------------------------------------------------


class GraphCounter:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self):
        torch._dynamo.reset()
        self.graphs = 0

    def __deepcopy__(self, memo):  # generate copies its configuration, and with it the backend
        return self

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return graph.forward


def _compiled(model, prompt: torch.Tensor, dynamic: bool | None, backend, **options) -> torch.Tensor:
    compile_config = CompileConfig(fullgraph=True, dynamic=dynamic, backend=backend, mode=None)
    compile_config._compile_all_devices = True  # generate compiles by itself on accelerators only
    model._compiled_call = None  # the previous test's
    return generate(
        model, prompt, cache_implementation="static", compile_config=compile_config, eos_token_id=None, **options
    )


@pytest.mark.parametrize(
    ("name", "implementation", "length", "dynamic"),
    [
        ("gqa", "dcformer_chunked", 23, None),
        ("gqa", "dcformer_chunked", 5, None),  # the window fills up while decoding
        ("gqa", "dcformer_chunked", 5, True),
        ("gqa", "eager", 5, None),
        ("global", "dcformer_chunked", 23, None),
        ("global", "eager", 5, None),
    ],
)
def test_compiled_static_decoding(name, implementation, length, dynamic):
    """generate's own compilation: no graph breaks, and a single graph for all steps."""
    model = copy.deepcopy(model_named(name, implementation))
    prompt, backend = tokens(length), GraphCounter()
    want = greedy(model, prompt)[:, length:]
    torch.testing.assert_close(_compiled(model, prompt, dynamic, backend), want)
    assert backend.graphs == 1


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("length", [5, 23])
def test_one_graph_for_any_prompt(length, with_mask):
    """`torch.compile(model)` and a static cache that keeps every layer whole: one graph, short prompts included."""
    model = model_named("gqa")
    whole = copy.deepcopy(model.config)
    whole.layer_types = ["full_attention"] * whole.num_hidden_layers
    total = length + NEW_TOKENS
    cache, backend = StaticCache(config=whole, max_cache_len=total), GraphCounter()
    step = torch.compile(model, fullgraph=True, backend=backend)
    ids = tokens(length, batch=2)
    with torch.no_grad():
        logits = model(ids, past_key_values=cache).logits
        for _ in range(NEW_TOKENS):
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            options = {"attention_mask": torch.ones(2, total, dtype=torch.long)} if with_mask else {}
            logits = step(ids[:, -1:].contiguous(), past_key_values=cache, **options).logits
            torch.testing.assert_close(logits[:, -1], model(ids, use_cache=False).logits[:, -1], rtol=0, atol=1e-4)
    assert backend.graphs == 1


def test_compiled_chunked_prefill(length=60):
    """Here the prefill is compiled too; nothing more on the second call."""
    model = copy.deepcopy(model_named("gqa"))
    prompt, backend = tokens(length), GraphCounter()
    out = _compiled(model, prompt, None, backend, prefill_chunk_size=20)
    torch.testing.assert_close(out, greedy(model, prompt)[:, length:])
    before = backend.graphs
    assert before
    torch.testing.assert_close(_again(model, prompt, backend, prefill_chunk_size=20), out)
    assert backend.graphs == before


def _again(model, prompt, backend, **options):
    """A second call of the same compiled model."""
    compiled = model._compiled_call
    compile_config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    compile_config._compile_all_devices = True
    out = generate(model, prompt, cache_implementation="static", compile_config=compile_config, **options)
    assert model._compiled_call is compiled
    return out


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on a CPU needs a C++ compiler")
@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_inductor(implementation):
    model = copy.deepcopy(model_named("gqa", implementation))
    torch._dynamo.reset()
    prompt = tokens(23, batch=2)
    torch.testing.assert_close(_compiled(model, prompt, True, "inductor"), greedy(model, prompt)[:, 23:])


def test_a_model_around_this_one():
    """`generate` is the outer model's, which allocates plain rows for chunks of the prompt."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
    config = LlavaConfig(vision_config=vision, text_config=model_named("gqa").config, image_token_index=5)
    model, prompt = randomize(LlavaForConditionalGeneration(config)).eval(), tokens(20).clamp_min(6)
    options = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [5], "pad_token_id": 0}
    expected = model.generate(prompt, use_cache=False, **options)
    for more in ({}, {"cache_implementation": "static"}, {"prefill_chunk_size": 6}):
        assert torch.equal(model.generate(prompt, **options, **more), expected)
    with pytest.raises(ValueError, match="an empty static cache for rows of a plain model"):
        model.generate(prompt, cache_implementation="static", prefill_chunk_size=6, **options)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on a CPU needs a C++ compiler")
@torch.no_grad()
def test_rows_of_a_compiled_window_go_to_their_places():
    """Chunks of a prompt, then single tokens: what inductor makes of a layer that turns its own rows."""

    def states(first, count):
        return (torch.arange(first, first + count).float().view(1, 1, -1, 1).expand(1, 2, -1, 16) + i for i in (0, 90))

    layers = [StaticWindowLayer(max_cache_len=64, sliding_window=8) for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(layers[1].update)
    for first, count in ((0, 8), (8, 8), (16, 5), (21, 1), (22, 1)):
        expected, found = (
            call(*states(first, count)) for call in (layers[0].update, layers[1].update if not first else compiled)
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), first
        assert torch.equal(layers[1].keys, layers[0].keys) and torch.equal(layers[1].values, layers[0].values), first


# --- the cost of a step -----------------------------------------------------------------------------------------------


def _record_lengths(model, path: str):
    """Records how many tokens a module is given. Call the result for the list; that ends the recording."""
    lengths = []

    def hook(module, args, kwargs):
        given = args[0] if args else kwargs["input_ids"]
        lengths.append(given.shape[1])

    handle = model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)

    def finish():
        handle.remove()
        return lengths

    return finish


class Elements(TorchDispatchMode):
    """Counts the elements that operations write, and the multiply-adds of matrix products."""

    def __init__(self):
        super().__init__()
        self.written = self.multiply_adds = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self.written += tensor.numel()
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.multiply_adds += out.numel() * args[0].shape[-1]
        return out


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_is_linear_in_the_cache(implementation, kind):
    """Twice the keys, at most twice the work; and the weight generators run for the new token only."""
    model = model_named("global", implementation)
    work = {}
    for length in (256, 512):
        ids = tokens(length + 1)
        cache = _make_cache(kind, model.config, length + 1)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=cache)
            finish = [
                _record_lengths(model, f"model.layers.{layer}.self_attn.{name}")
                for layer in range(2)
                for name in ("compose", "compose.dw1_proj", "compose.gate_proj", "k_proj", "v_proj")
            ]
            with Elements() as elements:
                model(ids[:, -1:], past_key_values=cache)
        assert [lengths() for lengths in finish] == [[1]] * 10
        work[length] = elements
    for count in ("written", "multiply_adds"):
        ratio = getattr(work[512], count) / getattr(work[256], count)
        assert 1.2 < ratio < 2.05, (count, ratio)


def test_a_local_layer_keeps_its_window_only():
    model = model_named("gqa")
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for piece in tokens(60).split(7, dim=1):
            model(piece, past_key_values=cache)
    assert [layer.keys.shape[2] for layer in cache.layers] == [WINDOW - 1, 60]
    static = StaticCache(config=model.config, max_cache_len=60)
    model(tokens(60), past_key_values=static)
    assert [layer.keys.shape[2] for layer in static.layers] == [WINDOW, 60]


# --- what is done to a cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dynamic", "unconfigured"])
@pytest.mark.parametrize("name", ["gqa", "groups", "pre-only"])
@torch.no_grad()
def test_reorder_select_repeat(name, kind):
    """Composition's channels follow their keys through everything that moves sequences of a batch."""
    model = model_named(name)
    ids, step = tokens(30, batch=3), tokens(1, batch=3, seed=9)
    want = model(torch.cat([ids, step], dim=1), use_cache=False).logits[:, -1]  # [B, V]
    picks = {
        "reorder_cache": (torch.tensor([2, 0, 0]), [2, 0, 0]),
        "batch_select_indices": (torch.tensor([1]), [1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
    }
    for operation, (argument, rows) in picks.items():
        cache = _make_cache(kind, model.config, 40)
        model(ids, past_key_values=cache)
        getattr(cache, operation)(argument)
        logits = model(step[rows], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(logits, want[rows], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gqa", "groups", "pre-only"])
@torch.no_grad()
def test_crop(name):
    """Tokens taken back leave no trace, past the window too where the cache records."""
    model = model_named(name)
    ids, other = tokens(30), tokens(4, seed=9)
    cache = DynamicCache(config=model.config)
    model(ids[:, :20], past_key_values=cache)
    cache.activate_past_recording()
    model(ids[:, 20:], past_key_values=cache)
    cache.crop(-6)
    logits = model(other, past_key_values=cache).logits
    want = model(torch.cat([ids[:, :24], other], dim=1), use_cache=False).logits[:, -4:]
    torch.testing.assert_close(logits, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_static_cache_is_reusable():
    model = model_named("gqa")
    cache = StaticCache(config=model.config, max_cache_len=40)
    for seed in (1, 2):
        ids = tokens(30, seed=seed)
        cache.reset()
        model(ids[:, :29], past_key_values=cache)
        want = model(ids, use_cache=False).logits[:, -1]
        torch.testing.assert_close(model(ids[:, 29:], past_key_values=cache).logits[:, -1], want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_early_initialization_of_a_static_cache(name):
    """What `prefill_chunk_size` allocates before the first forward is what the first forward brings."""
    model = model_named(name)
    cache = DynamicCache(config=model.config)
    model(prompts()[0][None], past_key_values=cache)
    keys, values = cache.layers[0].keys, cache.layers[0].values
    shape = model._get_static_cache_init_shape()
    if keys.shape[-1] != values.shape[-1]:
        assert name == "pre-only"
        assert shape is None  # the library knows one width for both: left to the first forward
    else:
        assert shape == (keys.shape[1], keys.shape[-1])


FOREIGN = {
    "head_dim": ({"head_dim": 16}, "head_dim of the model that filled it is 16, of this model 8"),
    "head_dim, same width": (
        {"head_dim": 16, "compose_key": False},
        "head_dim of the model that filled it is 16, of this model 8",
    ),
    "groups": ({"compose_groups": 2}, "compose_groups of the model that filled it is 2, of this model 1"),
    "heads": ({"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}, r"layer 0.*\(1, 8, 16\)"),
    "stage": ({"compose_post": False}, "compose_post of the model that filled it is False, of this model True"),
    "plain": (
        {"compose_query": False, "compose_key": False, "compose_pre": False, "compose_post": False},
        "compose_pre of the model that filled it is False, of this model True",
    ),
    "rank, other width": ({"compose_rank": 4}, "compose_rank of the model that filled it is 4, of this model 2"),
    "rank, same width": ({"compose_rank": 3}, "compose_rank of the model that filled it is 3, of this model 2"),
    "fewer layers": ({"num_hidden_layers": 1}, "1 layers.*has 2"),
    "more layers": ({"num_hidden_layers": 3}, "3 layers.*has 2"),
    "local where ours is global": ({"layer_pattern": "GL"}, "layer 1 of the cache keeps a window of 8"),
    "smaller window": ({"sliding_window": 4}, "layer 0 of the cache keeps a window of 4 keys.*sliding_window=8"),
}


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("case", FOREIGN)
def test_cache_of_another_model(case, static):
    overrides, message = FOREIGN[case]
    fields = {"num_key_value_heads": 4}
    other = make_model(tiny_config(**(fields | overrides)))
    cache = StaticCache(config=other.config, max_cache_len=30) if static else DynamicCache(config=other.config)
    other(tokens(20), past_key_values=cache)
    model = model_named("mha")
    with pytest.raises(ValueError, match=message):
        model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match=rf"{CACHE_NAME} (does not belong to this model|is a plain model's)"):
        generate(model, tokens(24), past_key_values=cache)


def test_cache_of_another_batch_or_kind():
    model = model_named("mha")
    cache = DynamicCache(config=model.config)
    model(tokens(20, batch=2), past_key_values=cache)
    with pytest.raises(ValueError, match=r"layer 0 .*\(2, 4, 16\).*\(3, 4, 16\).*same batch"):
        model(tokens(1, batch=3), past_key_values=cache)
    sizes = {name: getattr(tiny_config(), name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    llama = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, **sizes))
    library = llama(tokens(20), use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"layer 0 of the cache holds keys .*\(1, 2, 8\).*\(1, 4, 16\)"):
        model(tokens(1), past_key_values=library)
    with pytest.raises(ValueError, match="a tuple is not a Transformers cache"):
        model(tokens(1), past_key_values=((torch.zeros(1, 4, 3, 16),) * 2,) * 2)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(("first", "second"), [IMPLEMENTATIONS, IMPLEMENTATIONS[::-1]], ids=" then ".join)
def test_cache_that_another_implementation_filled(kind, first, second):
    model, ids = make_model(make_config("gqa")), tokens(40)
    cache = _make_cache(kind, model.config, 60)
    model.set_attn_implementation(first)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        model.set_attn_implementation(second)
        pieces = [model(ids[:, i : i + 5], past_key_values=cache).logits for i in (30, 35)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), model(ids).logits[:, 30:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize(
    ("filled", "used"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_cache_of_another_dtype(kind, filled, used):
    model = make_model(make_config("gqa")).to(filled)
    cache = _make_cache(kind, model.config, 60)
    model(tokens(20), past_key_values=cache)
    message = rf"layer 0 of the cache holds keys in {filled} on cpu, the model makes {used} on cpu.*convert"
    model.to(used)
    with pytest.raises(ValueError, match=message):
        model(tokens(1), past_key_values=cache)
    with pytest.raises(ValueError, match=message):
        generate(model, tokens(24), past_key_values=cache)


def test_cache_on_another_device():
    model = make_model(make_config("gqa"))
    cache = DynamicCache(config=model.config)
    model(tokens(20), past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
    with pytest.raises(ValueError, match=r"layer 0 of the cache holds keys in torch.float32 on meta.*on cpu"):
        model(tokens(1), past_key_values=cache)


@pytest.fixture(scope="module", autouse=True)
def _free():
    yield
    model_named.cache_clear()
    torch._dynamo.reset()
    gc.collect()
