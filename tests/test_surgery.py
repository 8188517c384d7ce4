"""Layers removed, swapped, repeated or changed after loading: one answer in every implementation, cache and padding."""

import copy

import pytest
import torch
from helpers import randomize, tiny_config
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dcformer import ComposeTrace, DCFormerForCausalLM
from dcformer.cache_dcformer import CACHE_NAME

WINDOW = 6


def remove_first(model):
    model.model.layers = nn.ModuleList(list(model.model.layers)[1:])


def remove_first_and_say_so(model):
    remove_first(model)
    kinds = model.config.layer_types[1:]
    model.config.num_hidden_layers, model.config.layer_types = 3, kinds


def swap(model):
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[1], layers[0], *layers[2:]])


def repeat(model):
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[0], layers[1], layers[0], layers[1]])


def transplant(model):
    """A layer of a model with another window, whose configuration the layer still holds."""
    torch.manual_seed(5)
    donor = randomize(DCFormerForCausalLM(tiny_config(sliding_window=3, layer_pattern="L"))).double()
    donor.set_attn_implementation(model.config._attn_implementation)
    model.model.layers[1] = donor.model.layers[0]


def narrow(model):
    model.config.sliding_window = 4


def change_kind(model):
    model.config.layer_types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]


SURGERY = [remove_first, remove_first_and_say_so, swap, repeat, transplant, narrow, change_kind]


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(0)
    return randomize(DCFormerForCausalLM(tiny_config(num_hidden_layers=4, sliding_window=WINDOW))).double().eval()


PIECES = {"in pieces": 19, "token by token": 1}


def answers(model, ids, mask, pieces=PIECES):
    """Logits of real tokens: at once, with a cache, and behind one in pieces of so many tokens."""
    real = mask.bool()
    found = {}
    with torch.no_grad():
        found["at once"] = model(ids, attention_mask=mask, use_cache=False).logits[real]
        found["cached"] = model(ids, attention_mask=mask, use_cache=True).logits[real]
        for name, cut in pieces.items():
            cache, parts = DynamicCache(config=model.config), []
            for start in [0, *range(20, ids.shape[1], cut)]:
                stop = 20 if start == 0 else min(ids.shape[1], start + cut)
                output = model(
                    ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True,
                    position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop],
                )  # fmt: skip
                parts.append(output.logits)
            found[name] = torch.cat(parts, dim=1)[real]
    return found


@pytest.mark.parametrize("surgery", SURGERY, ids=lambda f: f.__name__)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_one_answer_after_surgery(whole, surgery, padded):
    torch.manual_seed(1)
    ids = torch.randint(97, (2, 41))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :3] = 0
    results = {}
    for implementation in ("eager", "dcformer_chunked"):
        model = copy.deepcopy(whole)
        model.set_attn_implementation(implementation)
        surgery(model)
        for name, logits in answers(model, ids, mask).items():
            results[implementation, name] = logits
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    reference = copy.deepcopy(whole)
    reference.set_attn_implementation("eager")
    surgery(reference)
    with torch.no_grad():
        expected = reference(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
        before = whole(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
    assert (expected - before).abs().max() > 1e-2  # the surgery changes the model
    for (implementation, name), logits in results.items():
        if name in PIECES or not padded:
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9, msg=f"{implementation}, {name}")
    for name in ("at once", "cached"):
        torch.testing.assert_close(results["dcformer_chunked", name], results["eager", name], rtol=1e-9, atol=1e-9)


def test_the_window_is_that_of_the_configuration(whole):
    """Against the definition: a local layer's query sees the last `sliding_window` keys, also of a changed one."""
    for window in (WINDOW, 4):
        model = copy.deepcopy(whole)
        model.config.sliding_window = window
        model.config.layer_types = ["sliding_attention"] * 4
        ids = torch.randint(97, (1, 40))
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % 97
        reach = 4 * (window - 1)  # the last position that the first token can reach through four layers
        difference = (model(ids).logits - model(other).logits)[0].abs().amax(-1)
        assert difference[reach] > 0 and not difference[reach + 1 :].any()


def test_a_model_with_fewer_layers_says_so_when_it_is_saved(whole, tmp_path):
    model = copy.deepcopy(whole)
    remove_first(model)
    with pytest.raises(ValueError, match=r"has 3 layers and config\.num_hidden_layers=4.*num_hidden_layers = 3"):
        model.save_pretrained(tmp_path)
    assert not any(tmp_path.iterdir())
    model.config.num_hidden_layers = 3
    model.save_pretrained(tmp_path)
    loaded = DCFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = torch.randint(3, 60, (2, 9))
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-9, atol=1e-9)


def test_a_trace_is_not_filled_twice(whole):
    """Under gradient checkpointing the backward pass runs layers again."""
    model = copy.deepcopy(whole).train()
    model.set_attn_implementation("eager")
    model.gradient_checkpointing_enable()
    ids, trace = torch.randint(3, 60, (1, 5)), ComposeTrace()
    with pytest.raises(ValueError, match="compose_trace with gradient checkpointing"):
        model(ids, compose_trace=trace)
    with torch.no_grad():
        model(ids, compose_trace=trace)
    model.eval()(ids, compose_trace=trace)
    assert len(trace.layers) == 2 * model.config.num_hidden_layers


MAPS = {"key_head_map": [[0, 0, 1, 1], [0, 1, 1, 0]], "value_head_map": [[0, 0, 1, 1], [0, 1, 1, 0]]}


@pytest.mark.parametrize("call", ["forward", "save"])
def test_head_maps_move_with_their_layers(call, tmp_path):
    """By position they are saved and loaded, so the rows of the configuration must move, too."""
    torch.manual_seed(0)
    model = randomize(DCFormerForCausalLM(tiny_config(num_key_value_heads=4, **copy.deepcopy(MAPS)))).double().eval()
    ids = torch.randint(97, (1, 20))
    before = model(ids).logits
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    model.config.layer_types.reverse()
    with pytest.raises(
        ValueError, match=r"layer 0 was made with \[0, 1, 1, 0\] for key_head_map.*asks for \[0, 0, 1, 1\]"
    ):
        model(ids) if call == "forward" else model.save_pretrained(tmp_path)
    for rows in (model.config.key_head_map, model.config.value_head_map):
        rows.reverse()
    expected = model(ids).logits
    assert (expected - before).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = DCFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [None, [[0, 1, 1, 0], [0, 0, 1, 1]], [[0, 0, 1, 1]]], ids=["none", "other", "fewer"])
def test_changed_head_maps_are_refused(rows):
    model = DCFormerForCausalLM(tiny_config(num_key_value_heads=4, **copy.deepcopy(MAPS)))
    model.config.key_head_map = model.config.value_head_map = rows
    with pytest.raises(ValueError, match="for key_head_map, the configuration asks for"):
        model(torch.randint(97, (1, 3)))


def test_functions_of_the_library_get_the_window_of_the_place(monkeypatch):
    """Not that of the model that a layer comes from."""
    plain = {"compose_pre": False, "compose_post": False, "compose_query": False, "compose_key": False}
    torch.manual_seed(0)
    donor = DCFormerForCausalLM(tiny_config(layer_pattern="G", num_hidden_layers=1, sliding_window=3, **plain))
    model = DCFormerForCausalLM(tiny_config(num_hidden_layers=4, sliding_window=WINDOW, **plain))
    model.model.layers[2], model.model.layers[3] = donor.model.layers[0], copy.deepcopy(donor.model.layers[0])
    handed = []
    whole = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def spy(*args, **kwargs):
        handed.append(kwargs["sliding_window"])
        return whole(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", spy)
    model.set_attn_implementation("sdpa")
    model(torch.randint(97, (1, 20)))
    kinds = model.config.layer_types
    assert handed == [WINDOW if kind == "sliding_attention" else None for kind in kinds] and len(set(handed)) == 2


@pytest.mark.parametrize("implementation", ["dcformer_chunked", None])
def test_a_layer_of_a_model_with_another_implementation(whole, implementation):
    torch.manual_seed(5)
    donor = randomize(DCFormerForCausalLM(tiny_config(attn_implementation="eager"))).double().eval()
    model, ids = copy.deepcopy(whole), torch.randint(97, (1, 20))
    model.model.layers[1] = donor.model.layers[0]
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation(implementation)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-9, atol=1e-9)


def test_more_layers_than_kinds_are_refused(whole):
    model = copy.deepcopy(whole)
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 5
    with pytest.raises(ValueError, match=r"5 layers.*num_hidden_layers=5.*layer_types has 4 entries"):
        model(torch.zeros(1, 3, dtype=torch.long))


@torch.no_grad()
def test_a_number_beyond_the_layers_changes_nothing(whole):
    """With and without a cache, as in other models of the library; `save_pretrained` refuses it."""
    model, ids = copy.deepcopy(whole), torch.arange(20)[None]
    expected = model(ids, use_cache=False).logits
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    continued = model.generate(ids, **options)
    model.config.num_hidden_layers = 5
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    for kind in ("dynamic", "static"):
        found = model.generate(ids, **options, cache_implementation=kind, disable_compile=True)
        assert found.tolist() == continued.tolist()


BAD_FIELDS = [
    ({"sliding_window": -3}, "'sliding_attention' but sliding_window=-3"),
    ({"sliding_window": -1}, "'sliding_attention' but sliding_window=-1"),
    ({"sliding_window": 0}, "'sliding_attention' but sliding_window=0"),
    ({"sliding_window": 1}, "'sliding_attention' but sliding_window=1: .*at least 2"),
    ({"sliding_window": None}, "'sliding_attention' but sliding_window=None"),
    ({"layer_types": ["foo", "full_attention"] * 2}, r"layer_types holds unknown \['foo'\]"),
    ({"layer_types": None}, "layer_types=None"),
    ({"layer_types": []}, "num_hidden_layers=4.*layer_types has 0 entries"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1 must not be negative"),
]
CALLS = {
    "uncached": lambda model, ids: model(ids, use_cache=False),
    "cached": lambda model, ids: model(ids, use_cache=True),
    "generate": lambda model, ids: model.generate(ids, max_new_tokens=2, pad_token_id=0),
    "static": lambda model, ids: model.generate(
        ids, max_new_tokens=2, pad_token_id=0, cache_implementation="static", disable_compile=True
    ),
    "save": lambda model, ids: model.save_pretrained("nowhere"),
}


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS, ids=lambda value: str(value)[:30])
@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("call", CALLS)
def test_bad_fields_are_refused_by_name(whole, fields, message, implementation, call, tmp_path, monkeypatch):
    """Also those that were right in the call before, and lists that are changed in place."""
    monkeypatch.chdir(tmp_path)
    model = copy.deepcopy(whole)
    model.set_attn_implementation(implementation)
    ids = torch.randint(97, (1, 20))
    model(ids)
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(model.config, name)[:] = value
        else:
            setattr(model.config, name, value)
    message = "layer_types" if call == "save" and fields.get("layer_types") == [] else message
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        CALLS[call](model, ids)


def test_a_window_that_no_layer_has_is_not_looked_at(whole):
    model = copy.deepcopy(whole)
    model.config.layer_types = ["full_attention"] * 4
    ids = torch.randint(97, (1, 20))
    expected = model(ids).logits
    model.config.sliding_window = -1
    assert torch.equal(model(ids).logits, expected)


def test_another_window_than_the_caches_is_refused(whole):
    model = copy.deepcopy(whole)
    ids = torch.randint(97, (1, 20))
    cache = model(ids, use_cache=True).past_key_values
    model.config.sliding_window = WINDOW + 4
    with pytest.raises(ValueError, match=rf"window of {WINDOW} keys.*sliding_window={WINDOW + 4}"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
@pytest.mark.parametrize("window", [None, 3])
def test_bidirectional_attention_is_asked_for_by_the_configuration_or_the_call(whole, implementation, window):
    model = copy.deepcopy(whole)
    model.set_attn_implementation(implementation)
    model.config.layer_types = ["full_attention" if window is None else "sliding_attention"] * 4
    ids = torch.randint(97, (2, 30))
    causal = model(ids, use_cache=False).logits
    called = model(ids, use_cache=False, is_causal=False).logits
    model.config.is_causal = False
    configured = model(ids, use_cache=False).logits
    model.set_attn_implementation("eager")
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(configured, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(called, expected, rtol=1e-9, atol=1e-9)
    assert (causal - expected).abs().max() > 1e-2
    cached = model(ids, past_key_values=DynamicCache(config=model.config)).logits
    torch.testing.assert_close(cached, expected, rtol=1e-9, atol=1e-9)
    static = StaticCache(config=model.config, max_cache_len=40)
    with pytest.raises(ValueError, match=r"is_causal=False with a StaticCache.*not filled"):
        model(ids, past_key_values=static)
    assert torch.isfinite(model(ids, past_key_values=static, is_causal=True).logits).all()


@pytest.mark.parametrize("implementation", ["eager", "dcformer_chunked"])
def test_generate_in_training_with_gradient_checkpointing_keeps_its_cache(whole, implementation):
    model = copy.deepcopy(whole)
    model.set_attn_implementation(implementation)
    ids = torch.randint(97, (2, 20))
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.eval().generate(ids, **arguments)
    model.train()
    model.gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, **arguments), expected)
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 20
    with pytest.raises(ValueError, match=rf"{CACHE_NAME}.*gradient checkpointing.*torch.no_grad"):
        model(ids, past_key_values=DynamicCache(config=model.config))
    assert model.is_gradient_checkpointing
    model(ids, labels=ids).loss.backward()  # and training goes on
