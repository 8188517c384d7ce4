"""Layers hold and show exactly what the library's own do; caches of other models are noticed."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
from helpers import randomize, tiny_config
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from dcformer import DCFormerForCausalLM, DCFormerForTokenClassification, cache_dcformer
from dcformer.cache_dcformer import (
    CACHE_NAME,
    CACHE_NAMES,
    LEAST_ROOM,
    GrowingLayer,
    GrowingWindowLayer,
    StaticFullLayer,
    StaticWindowLayer,
    check_cache_layers,
    lend_room,
    use_growing_layers,
    use_static_layers,
)


def _states(start, count):
    """Keys and values [1, 2, count, 3] that tell their position."""
    positions = torch.arange(start, start + count, dtype=torch.float32).view(1, 1, count, 1)
    return positions.expand(1, 2, count, 3) + 1, -positions.expand(1, 2, count, 3) - 1


@settings(deadline=None, max_examples=60)
@given(
    window=st.integers(2, 7),
    capacity=st.integers(2, 20),
    pieces=st.lists(st.tuples(st.one_of(st.just(1), st.integers(1, 6)), st.booleans()), min_size=1, max_size=12),
)
@example(window=3, capacity=9, pieces=[(3, False), (1, False), (1, False)])  # just full
@example(window=3, capacity=9, pieces=[(2, False), (1, True), (1, True), (1, True), (2, False), (1, True), (1, False)])
@torch.no_grad()
def test_same_as_the_librarys_layer(window, capacity, pieces):
    """Single tokens also by way of memory that is lent, where their rows go round."""
    own = StaticWindowLayer(max_cache_len=capacity, sliding_window=window)
    library = StaticSlidingWindowLayer(max_cache_len=capacity, sliding_window=window)
    cache, seen = StaticCache(config=tiny_config(), max_cache_len=capacity), 0
    cache.layers[0] = own
    for count, is_lent in pieces:
        assert tuple(int(n) for n in own.get_mask_sizes(count)) == library.get_mask_sizes(count)
        states = _states(seen, count)
        theirs = library.update(*states)
        room = lend_room(cache, 0, [new.shape for new in states], states[0]) if is_lent else None
        assert (room is not None) == (is_lent and seen > 0 and count == 1)
        if room is not None:
            assert room.is_ring and room.place is own.cumulative_length and int(room.place) == seen
            for memory, held, new in zip((room.keys, room.values), (own.keys, own.values), states, strict=True):
                assert memory is held
                memory[:, :, seen % own.max_cache_len] = new[:, :, 0]
            room.count(1)
        else:
            ours = own.update(*states)
            for mine, its in zip(ours, theirs, strict=True):
                assert torch.equal(mine, its)
        seen += count
        assert int(own.get_seq_length()) == library.get_seq_length() == seen
    own.reset()
    assert int(own.get_seq_length()) == 0 and not own.keys.any()
    assert torch.equal(own.update(*_states(5, 1))[0][0, 0, 0], torch.full((3,), 6.0))


def _written(layer, seen):
    """Whether the layer has lent room for a token, which is written there."""
    new = _states(seen, 1)
    room = layer.lend([states.shape for states in new], new[0])
    if room is not None:
        for memory, states in zip((room.keys, room.values), new, strict=True):
            memory[:, :, room.row : room.row + 1] = states
        room.count(1)
    return room is not None


def _crop(layer):
    layer.crop(-min(2, layer.get_seq_length()))


def _differentiated(layer):
    with torch.inference_mode(False), torch.enable_grad():
        keys, values = _states(90, 1)
        layer.update(keys.clone().requires_grad_(), values)
    layer.keys = layer.keys.detach()


def _inferred(layer):
    with torch.inference_mode():
        layer.update(*_states(80, 2))


BETWEEN = {
    "cut": _crop,
    "choose": lambda layer: layer.batch_select_indices(torch.tensor([0])),
    "repeat": lambda layer: layer.batch_repeat_interleave(1),
    "reorder": lambda layer: layer.reorder_cache(torch.tensor([0])),
    "forget": lambda layer: layer.reset() if layer.is_initialized else None,
    "differentiate": _differentiated,
    "infer": _inferred,
}


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.one_of(st.integers(0, 50), st.sampled_from([1, 1, "lend", "copy", "snapshot", *BETWEEN])),
        min_size=1,
        max_size=25,
    )
)
@example([3, 1, "copy", 1, 1])
@example([3, "lend", "lend", "cut", "lend", "copy", "lend", "choose", 1])
@example([3, "lend", "differentiate", "lend", "forget", 1, "lend"])
@example([3, "lend", "snapshot", "lend", "snapshot", 1])
@example([3, "lend", "reorder", "lend", "reorder", 1])
@example(["infer", 1, "copy", 1])
@example([40, "infer", 1, "differentiate", 1, "cut", 1, 1])
def test_a_growing_layer_is_the_librarys(calls):
    """Whatever else is done to it; and what it has given out stays as it was."""
    own, library, seen, given_out = GrowingLayer(), DynamicLayer(), 0, []
    with torch.no_grad():
        for call in calls:
            if isinstance(call, int):
                ours, theirs = (layer.update(*_states(seen, call)) for layer in (own, library))
                seen += call
                given_out += [(mine, mine.clone()) for mine in ours]
                assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
            elif call == "copy":
                original, own = own, copy.deepcopy(own)
                original.update(*_states(99, 1))  # of which the copy must know nothing
            elif call == "snapshot":  # which shares what is held, and nothing else
                original, own = own, copy.copy(own)
                if not original.is_initialized or not _written(original, 99):
                    original.update(*_states(99, 1))
                given_out.append((original.keys, original.keys.clone()))  # nor may the copy write there
            elif call == "lend":
                library.update(*_states(seen, 1))
                if not _written(own, seen):
                    own.update(*_states(seen, 1))
                seen += 1
                continue  # what is lent is written in many steps before somebody asks for it
            else:
                for layer in (own, library):
                    BETWEEN[call](layer)
            assert own.get_seq_length() == library.get_seq_length()
            assert not seen or own.keys is None or torch.equal(own.keys, library.keys)
    assert all(torch.equal(now, before) for now, before in given_out)


def test_a_growing_layer_seldom_moves():
    layer, moves = GrowingLayer(), 0
    with torch.no_grad():
        layer.update(*_states(0, 160))
        for step in range(160, 320):
            before = layer.keys.data_ptr(), layer.values.data_ptr()
            layer.update(*_states(step, 1))
            moves += before != (layer.keys.data_ptr(), layer.values.data_ptr())
    assert 0 < moves <= 160 // 32
    layer.reset()
    assert not layer._memory


def test_gradients_go_through_a_growing_layer():
    """Those of keys that were given out before others were added, too."""
    first, second = (_states(seen, count)[0].requires_grad_() for seen, count in ((0, 3), (3, 2)))
    found = []
    for layer in (GrowingLayer(), DynamicLayer()):
        with torch.no_grad():
            layer.update(*_states(0, 0))
        before = layer.update(first, first)[0]
        squares = before.square().sum()  # keeps what was given out
        after = layer.update(second, second)[0]
        assert not getattr(layer, "_memory", None)
        found.append(torch.autograd.grad(squares + after.pow(3).sum(), [first, second]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("lent", [False, True])
def test_in_graphs_a_growing_layer_adds_tokens_in_the_librarys_way(lent):
    layer, compiled = GrowingLayer(), torch.compile(GrowingLayer.update, backend="eager", fullgraph=True)
    with torch.no_grad():
        layer.update(*_states(0, 2))
        if lent:
            assert _written(layer, 2)  # and nobody has asked for it since
        else:
            layer.update(*_states(2, 1))
        keys, values = compiled(layer, *_states(3, 2))
        assert not layer._memory
        assert all(torch.equal(*pair) for pair in zip((keys, values), _states(0, 5), strict=True))
        layer.update(*_states(5, 1))
    assert torch.equal(layer.keys, _states(0, 6)[0])


@pytest.mark.parametrize("window", [None, 4])
def test_in_graphs_nothing_is_lent(window):
    layer = GrowingLayer() if window is None else GrowingWindowLayer(sliding_window=window)

    @torch.compile(backend="eager", fullgraph=True)
    def step(layer, keys, values):
        return layer.lend([keys.shape, values.shape], keys), *layer.update(keys, values)

    with torch.no_grad():
        layer.update(*_states(0, 2))
        assert _written(layer, 2)  # and nobody has asked for it since
        for seen in (3, 4):
            room, keys, _ = step(layer, *_states(seen, 1))
            assert room is None
            assert torch.equal(keys, _states(0, seen + 1)[0][:, :, -(window or 99) :])


@pytest.mark.parametrize("field", ["batch", "dtype"])
def test_a_growing_layer_refuses_what_the_librarys_refuses(field):
    layer = GrowingLayer()
    with torch.no_grad():
        layer.update(*_states(0, 3))
        if field == "batch":
            with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
                layer.update(*(states.expand(2, -1, -1, -1) for states in _states(3, 1)))
        else:
            keys, _ = layer.update(*(states.double() for states in _states(3, 1)))
            assert keys.dtype == torch.float64 and keys[0, 0, :, 0].tolist() == [1, 2, 3, 4]


def test_empty_layers_that_would_be_copied_for_every_token_are_replaced():
    config = tiny_config(layer_pattern="LG")
    kinds = ["GrowingWindowLayer", "GrowingLayer"]
    model = randomize(DCFormerForCausalLM(config)).eval()
    ids = torch.randint(97, (1, 5))
    for cache in (DynamicCache(config=config), None):
        with torch.no_grad():
            cache = model(ids, past_key_values=cache, use_cache=True).past_key_values
        assert [type(layer).__name__ for layer in cache.layers] == kinds
    plain = DynamicCache()
    use_growing_layers(plain)
    plain.update(*_states(0, 2), 1)
    assert [type(layer) for layer in plain.layers] == [GrowingLayer] * 2
    assisted = DynamicCache(config=config)
    assisted.layers[0].record_past = True  # as `activate_past_recording`, which the lowest version does not have
    use_growing_layers(assisted)
    assert assisted.layers[0].record_past and assisted.layers[0].sliding_window == config.sliding_window
    filled = DynamicCache()
    filled.update(*_states(0, 2), 0)
    offloaded = DynamicCache(config=config)
    offloaded.offloading = True
    for cache in (filled, offloaded, StaticCache(config, max_cache_len=4)):
        before = [type(layer) for layer in cache.layers]
        use_growing_layers(cache)
        assert [type(layer) for layer in cache.layers] == before


@torch.no_grad()
def test_tokens_of_a_replayed_graph_are_counted(monkeypatch):
    """A CUDA graph that was captured by hand counts on the device alone. The first token is that of the capture."""
    own, library = (kind(max_cache_len=9, sliding_window=4) for kind in (StaticWindowLayer, StaticSlidingWindowLayer))
    seen, replayed = 0, False
    for count in (3, 1, 2, 1, 2, 1, 3):
        before = own._int_is_stale, own.cumulative_length_int
        with monkeypatch.context() as patch:
            patch.setattr(cache_dcformer, "is_captured", lambda device, captured=not replayed: captured)
            ours = own.update(*_states(seen, count))
        theirs = library.update(*_states(seen, count))
        if count == 1:
            if replayed:
                own._int_is_stale, own.cumulative_length_int = before
            replayed = True
        seen += count
        assert int(own.cumulative_length) == seen and all(map(torch.equal, ours, theirs))


def test_a_filled_cache_is_not_emptied():
    cache = StaticCache(config=tiny_config(), max_cache_len=9)
    for index in range(2):
        cache.update(*_states(0, 3), index)
    with pytest.raises(ValueError, match="before its first use, and this one holds tokens"):
        use_static_layers(cache, 4)


def test_decoding_keeps_its_memory_in_place():
    layer = StaticWindowLayer(max_cache_len=9, sliding_window=4)
    layer.update(*_states(0, 3))
    addresses = layer.keys.data_ptr(), layer.values.data_ptr(), layer.cumulative_length.data_ptr()
    for step in range(3, 9):
        layer.update(*_states(step, 1))
    assert addresses == (layer.keys.data_ptr(), layer.values.data_ptr(), layer.cumulative_length.data_ptr())


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("capacity", [20, 5])  # longer and shorter than the window
def test_only_sliding_and_empty_layers_are_replaced(ahead, capacity):
    config = tiny_config()
    length = min(capacity, config.sliding_window)
    cache = StaticCache(config=config, max_cache_len=capacity)
    if ahead:
        cache.early_initialization(batch_size=2, num_heads=2, head_dim=16, dtype=torch.float32, device="cpu")
    use_static_layers(cache, config.sliding_window)
    assert [type(layer) for layer in cache.layers] == [StaticWindowLayer, StaticLayer if ahead else StaticFullLayer]
    assert cache.layers[0].max_cache_len == length
    if ahead:
        assert cache.layers[0].keys.shape == (2, 2, length, 16)


class _Counted(list):
    """Layers that count how often all of them are looked at."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def test_layers_are_looked_at_when_a_cache_comes_to_a_model_and_not_again():
    config, other = tiny_config(), tiny_config()
    cache = DynamicCache(config=config)
    cache.layers = layers = _Counted(cache.layers)
    check_cache_layers(cache, config, 1)
    looks = layers.looks
    assert looks
    for user in (config, other, tiny_config(compose_static=True)):
        check_cache_layers(cache, user, 1)
        assert layers.looks == looks
    config.sliding_window = 4
    check_cache_layers(cache, config, 1)
    assert layers.looks == 2 * looks


@pytest.fixture(scope="module")
def windows():
    """By window and pattern: a model in float64, all with the same parameters."""
    torch.manual_seed(0)
    source = randomize(DCFormerForCausalLM(tiny_config())).double().eval()
    models = {}
    for pattern in ("LG", "L"):
        for window in (2, 4, 7):
            config = tiny_config(sliding_window=window, layer_pattern=pattern)
            models[window, pattern] = DCFormerForCausalLM(config).double().eval()
            models[window, pattern].load_state_dict(source.state_dict())
    return models


def _static(config, capacity, own):
    cache = StaticCache(config=config, max_cache_len=capacity)
    if own:
        use_static_layers(cache, config.sliding_window)
    return cache


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("pattern", ["LG", "L"])
@pytest.mark.parametrize("first", [1, 3], ids=["by token", "prompt"])
def test_a_static_cache_of_any_window_is_right_or_refused(windows, pattern, own, first):
    """Refused is only what cannot be right: layers that lose keys which a query of the model sees."""
    ids = torch.randint(97, (1, 12))
    refused = 0
    for (made, _), (window, _) in itertools.product([key for key in windows if key[1] == pattern], repeat=2):
        for capacity in (3, 6, 12):
            model, held = windows[window, pattern], min(made, capacity)
            cache = _static(windows[made, pattern].config, capacity, own)
            with torch.no_grad():
                expected = model(ids[:, :capacity], use_cache=False).logits
                try:
                    for start in [0, *range(first, capacity)]:
                        stop = first if start == 0 else start + 1
                        logits = model(ids[:, start:stop], past_key_values=cache).logits
                        torch.testing.assert_close(logits, expected[:, start:stop], rtol=1e-9, atol=1e-9)
                except ValueError as error:
                    assert held < min(window, capacity)
                    assert f"keeps a window of {held} keys" in str(error)
                    assert f"sliding_window={window}" in str(error)
                    refused += 1
    assert refused == 8  # 2 for 4, 2 for 7, each at all capacities; 4 for 7, where that many tokens come


@pytest.mark.parametrize("kind", ["dynamic", "static", "own"])
@pytest.mark.parametrize("pattern", ["LG", "L"])
def test_a_used_cache_and_another_window(windows, kind, pattern):
    """A wider window than that of the tokens before needs keys that are gone; a narrower one does not."""
    narrow, model, wide = (copy.deepcopy(windows[window, pattern]) for window in (2, 4, 7))
    ids = torch.randint(97, (1, 12))

    def used():
        cache = DynamicCache(config=model.config) if kind == "dynamic" else _static(model.config, 20, kind == "own")
        model(ids[:, :11], past_key_values=cache)
        return cache

    with torch.no_grad():
        with pytest.raises(ValueError, match=r"window of 4 keys.*sliding_window=7"):
            wide(ids[:, 11:], past_key_values=used())
        whole = DynamicCache()  # keeps all
        model(ids[:, :11], past_key_values=whole)
        expected = narrow(ids[:, 11:], past_key_values=whole).logits
        torch.testing.assert_close(narrow(ids[:, 11:], past_key_values=used()).logits, expected)
        model.config.sliding_window = 7  # the same model, changed
        cache = DynamicCache(config=narrow.config) if kind == "dynamic" else _static(narrow.config, 20, kind == "own")
        # At the first token, if another layer tells how many the cache can hold.
        count = 3 if pattern == "L" and kind != "dynamic" else 1
        with pytest.raises(ValueError, match=r"window of 2 keys.*sliding_window=7"):
            model(ids[:, :count], past_key_values=cache)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_an_emptied_cache_is_anyones(kind):
    """Ranks 2 and 3 need the same number of channels; only what is held belongs to the model that filled it."""
    models = [DCFormerForCausalLM(tiny_config(num_key_value_heads=4, compose_rank=rank)).eval() for rank in (2, 3)]
    options = {"max_cache_len": 20} if kind is StaticCache else {}
    cache = kind(config=models[0].config, **options)
    ids = torch.arange(12)[None]
    models[0](ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"compose_rank of the model that filled it is 2, of this model 3"):
        models[1](ids[:, :1], past_key_values=cache)
    cache.reset()
    logits = models[1](ids, past_key_values=cache).logits
    torch.testing.assert_close(logits, models[1](ids, use_cache=False).logits)
    with pytest.raises(ValueError, match=r"compose_rank of the model that filled it is 3, of this model 2"):
        models[0](ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_a_cache_has_either_name(name, recwarn):
    """Transformers passes `past_key_values` up to 5.23, and `cache` from then on, when the former warns."""
    config = tiny_config(num_key_value_heads=4)
    model, ids, cache = DCFormerForCausalLM(config).eval(), torch.arange(12)[None] + 1, DynamicCache(config=config)
    whole = model(ids, use_cache=False).logits
    begun = model.model(ids[:, :5], **{name: cache})
    assert getattr(begun, CACHE_NAME) is cache and cache.get_seq_length() == 5
    logits = [model(ids[:, at : at + 1], **{name: cache}).logits for at in range(5, 12)]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole[:, 5:])
    for decorated in (model, model.model):
        assert [known for known in CACHE_NAMES if known in inspect.signature(decorated.forward).parameters] == [
            CACHE_NAME
        ]
        with pytest.raises(ValueError, match="Both `past_key_values` and `cache` are set"):
            decorated(ids, past_key_values=cache, cache=DynamicCache(config=config))
        other = next(known for known in CACHE_NAMES if known != name)
        again = decorated(ids[:, :5], **{name: DynamicCache(config=config), other: None})
        assert getattr(again, CACHE_NAME).get_seq_length() == 5
    warned = {str(warning.message) for warning in recwarn if "past_key" in str(warning.message)}
    outdated = CACHE_NAME == "cache" and name != CACHE_NAME
    assert warned == ({cache_dcformer._OUTDATED} if outdated else set())


@torch.no_grad()
def test_a_cache_by_another_name_is_refused(monkeypatch):
    """A later library may have one. Models that do not see it would generate wrong tokens."""
    model, ids = DCFormerForCausalLM(tiny_config(num_labels=3)).eval(), torch.arange(5)[None] + 1
    for callee in (model, model.model, DCFormerForTokenClassification(model.config).eval()):
        with pytest.raises(TypeError, match=r"kv=DynamicCache\(...\) is a cache by a name .* past_key_values or cache"):
            callee(ids, kv=DynamicCache(config=model.config))
    prepare = model.prepare_inputs_for_generation

    def renamed(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        return {**inputs, "state": inputs.pop(CACHE_NAME)}

    monkeypatch.setattr(model, "prepare_inputs_for_generation", renamed)
    with pytest.raises(TypeError, match="state=DynamicCache"):
        model.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("name", CACHE_NAMES)
@torch.no_grad()
def test_heads_of_the_library_take_either_name(name):
    config = tiny_config(num_labels=3)
    model, cache = DCFormerForTokenClassification(config).eval(), DynamicCache(config=config)
    model(torch.ones(1, 5, dtype=torch.long), **{name: cache})
    assert cache.get_seq_length() == 5


def test_where_some_layers_are_trained_with_checkpointing_these_take_no_cache():
    """A model in eval mode makes a cache by itself."""
    model, ids = randomize(DCFormerForCausalLM(tiny_config())).eval(), torch.arange(8)[None] + 1
    model(ids, labels=ids, use_cache=False).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.model.layers[-1].train()
    model(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name])


def test_a_layer_of_attention_takes_either_name():
    attention = DCFormerForCausalLM(tiny_config()).model.layers[0].self_attn
    x, rope = torch.randn(1, 3, attention.config.hidden_size), torch.zeros(2, 1, 3, attention.config.rotary_dim)
    caches = [DynamicCache(), DynamicCache()]
    outputs = [attention(x, rope, **{name: cache})[0] for name, cache in zip(CACHE_NAMES, caches, strict=True)]
    assert torch.equal(*outputs)
    assert [cache.get_seq_length() for cache in caches] == [3, 3]


@torch.no_grad()
def test_a_cache_that_is_returned_is_not_a_prediction():
    """`Trainer` leaves it out, by whichever name."""
    model = DCFormerForCausalLM(tiny_config())
    assert CACHE_NAME in model(torch.ones(1, 2, dtype=torch.long), use_cache=True)
    assert set(CACHE_NAMES) <= set(model.config.keys_to_ignore_at_inference)


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
@pytest.mark.parametrize("made_again", [copy.deepcopy, copy.copy, lambda cache: pickle.loads(pickle.dumps(cache))])
@torch.no_grad()
def test_a_copy_of_a_cache_has_the_same_owner(kind, made_again):
    """As for a prompt's cache, which is copied for each text behind it."""
    owner, other = (
        DCFormerForCausalLM(tiny_config(num_key_value_heads=4, compose_rank=rank)).eval() for rank in (2, 3)
    )
    cache = kind(config=owner.config, **({"max_cache_len": 20} if kind is StaticCache else {}))
    ids = torch.arange(12)[None]
    owner(ids[:, :11], past_key_values=cache)
    with pytest.raises(ValueError, match=r"compose_rank of the model that filled it is 2, of this model 3"):
        other(ids[:, 11:], past_key_values=made_again(cache))
    logits = owner(ids[:, 11:], past_key_values=made_again(cache)).logits
    torch.testing.assert_close(logits, owner(ids, use_cache=False).logits[:, 11:])


@settings(deadline=None)
@given(
    window=st.integers(2, 7),
    pieces=st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.booleans()), min_size=1, max_size=14),
)
@torch.no_grad()
def test_a_window_that_lends_room_is_the_librarys(window, pieces):
    """Tokens that are written to its memory and tokens that are added, in any order, also after a choice of beams."""
    own, library = GrowingWindowLayer(sliding_window=window), DynamicSlidingWindowLayer(sliding_window=window)
    seen, given_out = 0, []
    for count, lent, chosen in pieces:
        keys, values = _states(seen, count)
        expected = library.update(keys, values)
        assert own.get_mask_sizes(count)[0] >= count
        room = own.lend([keys.shape, values.shape], keys) if lent else None
        if room is None:
            assert not lent or not own.is_initialized
            found = own.update(keys, values)
        else:
            stop = room.row + count
            room.keys[:, :, room.row : stop], room.values[:, :, room.row : stop] = keys, values
            found = [memory[:, :, :stop].clone() for memory in (room.keys, room.values)]
            room.count(count)
        seen += count
        for one, other in zip((*found, own.keys, own.values), (*expected, library.keys, library.values), strict=True):
            assert torch.equal(one, other)
        assert own.get_seq_length() == library.get_seq_length() == seen
        assert own.get_mask_sizes(3) == library.get_mask_sizes(3)
        given_out.append((own.keys, own.keys.clone()))
        if chosen:
            for layer in (own, library):
                layer.reorder_cache(torch.tensor([0]))
    assert all(torch.equal(held, copy) for held, copy in given_out)


@pytest.mark.parametrize("kind", [GrowingLayer, GrowingWindowLayer])
@torch.no_grad()
def test_memory_is_not_held_twice(kind):
    """What other operations have replaced is let go, not kept until the next token."""
    layer = kind() if kind is GrowingLayer else kind(sliding_window=9)
    layer.update(*_states(0, 3))
    changes = [lambda: layer.reorder_cache(torch.tensor([0]))]
    changes += [lambda: layer.update(*_states(4, 1))] * (kind is GrowingWindowLayer)
    for change in changes:
        layer.lend([(1, 2, 1, 3)] * 2, layer.keys)
        layer.take(1)
        assert layer._memory
        change()
        assert not layer._memory


def test_a_window_moves_seldom():
    layer, addresses = GrowingWindowLayer(sliding_window=9), set()
    with torch.no_grad():
        layer.update(*_states(0, 3))
        for step in range(3, 203):
            room = layer.lend([(1, 2, 1, 3)] * 2, layer.keys)
            addresses.add(room.keys.untyped_storage().data_ptr())
            given = layer.keys
            room.count(1)
            assert layer.keys.shape[2] == min(step + 1, 8) and given.shape[2] == min(step, 8)
    assert 2 <= len(addresses) <= 200 // LEAST_ROOM + 1


@torch.no_grad()
def test_windows_that_lend_no_room():
    """While tokens may be taken back, and where something else has cut what they hold."""
    for change in ("record_past", "cut", "empty"):
        layer = GrowingWindowLayer(sliding_window=4)
        if change != "empty":
            layer.update(*_states(0, 6))
            assert layer.lend([(1, 2, 1, 3)] * 2, layer.keys) is not None
        if change == "empty":  # as after an allocation ahead of use
            layer.lazy_initialization(*_states(0, 0))
        if change == "record_past":
            layer.record_past = True
        elif change == "cut":
            layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]
        assert layer.lend([(1, 2, 1, 3)] * 2, torch.zeros(())) is None


SHAPES = [(2, 4, 1, 8)] * 2


def filled_cache(kind, config, own=False):
    """A cache of two layers, of which the first holds three tokens of two sequences."""
    cache = kind(config=config, max_cache_len=9) if issubclass(kind, StaticCache) else kind(config=config)
    if own:
        use_static_layers(cache, config.sliding_window)
    if type(cache) is DynamicCache:
        use_growing_layers(cache)
    for index in range(2):
        cache.update(torch.randn(2, 4, 3, 8), torch.randn(2, 4, 3, 8), index)
    return cache


@pytest.mark.parametrize("kind", ["growing", "static", "own static"])
@torch.no_grad()
def test_layers_that_lend_room(kind):
    """Those that keep all rows, once they have memory. What is written there is what the layer then holds."""
    config = tiny_config(layer_types=["full_attention", "sliding_attention"])
    like = torch.randn(2, 4, 1, 8)
    cache = filled_cache(DynamicCache if kind == "growing" else StaticCache, config, kind == "own static")
    before = [cache.layers[0].keys[:, :, :3].clone(), cache.layers[0].values[:, :, :3].clone()]
    assert (lend_room(cache, 1, SHAPES, like) is None) == (kind == "static")  # whose windows move
    assert lend_room(cache, 2, SHAPES, like) is None
    for length in (3, 4, 5):
        room = lend_room(cache, 0, SHAPES, like)
        row = room.row if room.place is None else int(room.place)
        assert row == length and (room.place is None) == (kind == "growing")
        room.keys[:, :, row], room.values[:, :, row] = length, -length
        room.count(1)
        assert cache.get_seq_length(0) == length + 1
    for held, old, sign in zip((cache.layers[0].keys, cache.layers[0].values), before, (1, -1), strict=True):
        assert torch.equal(held[:, :, :3], old)
        assert [float(held[1, 2, row, 5]) for row in (3, 4, 5)] == [3 * sign, 4 * sign, 5 * sign]


@torch.no_grad()
def test_layers_that_lend_no_room():
    """Without memory, of other forms, in caches that do more than to keep rows."""
    config, like = tiny_config(layer_types=["full_attention"] * 2), torch.randn(2, 4, 1, 8)
    for kind in (DynamicCache, StaticCache):
        fresh = kind(config=config, max_cache_len=9) if kind is StaticCache else kind(config=config)
        use_growing_layers(fresh)
        assert lend_room(fresh, 0, SHAPES, like) is None
        cache = filled_cache(kind, config)
        assert lend_room(cache, 0, SHAPES, like) is not None
        others = [[(2, 4, 1, 8), shape] for shape in ((3, 4, 1, 8), (2, 2, 1, 8), (2, 4, 1, 9))]
        for shapes in [*others, *(shapes[::-1] for shapes in others)]:
            assert lend_room(cache, 0, shapes, like) is None
        assert lend_room(cache, 0, SHAPES, like.double()) is None
        assert lend_room(cache, 0, SHAPES, like.to("meta")) is None
        cache.offloading = True
        assert lend_room(cache, 0, SHAPES, like) is None
        other = filled_cache(type("Other", (kind,), {}), config)
        assert lend_room(other, 0, SHAPES, like) is None
    assert lend_room(filled_cache(StaticCache, config), 0, [(2, 4, 10, 8)] * 2, like) is None
    cache = filled_cache(DynamicCache, config)
    cache.layers[0].values = cache.layers[0].values[:, :, 1:]
    assert lend_room(cache, 0, SHAPES, like) is None
    with torch.enable_grad():
        assert lend_room(filled_cache(DynamicCache, config), 0, SHAPES, like) is None
    assert lend_room(EncoderDecoderCache(DynamicCache(), DynamicCache()), 0, SHAPES, like) is None


@torch.no_grad()
def test_what_a_growing_layer_gave_out_is_not_written_to_by_what_it_lends():
    """A room that is lent and not used changes nothing; nor do rows that are written after a cut."""
    config, like = tiny_config(layer_types=["full_attention"] * 2), torch.randn(2, 4, 1, 8)
    cache = filled_cache(DynamicCache, config)
    layer = cache.layers[0]
    given, copy = layer.keys, layer.keys.clone()
    lend_room(cache, 0, SHAPES, like).keys[:, :, 3] = 9.0
    assert layer.get_seq_length() == 3 and torch.equal(layer.keys, copy)
    room = lend_room(cache, 0, SHAPES, like)
    room.keys[:, :, 3] = 8.0
    room.count(1)
    longer, cut = layer.keys, layer.keys.clone()
    layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]
    room = lend_room(cache, 0, SHAPES, like)
    assert room.row == 2
    room.keys[:, :, 2] = 7.0
    room.count(1)
    assert torch.equal(given, copy) and torch.equal(longer, cut)
    assert torch.equal(layer.keys[:, :, :2], copy[:, :, :2]) and (layer.keys[:, :, 2] == 7).all()
    with torch.inference_mode():
        inference = lend_room(cache, 0, SHAPES, like).keys
        cache.batch_repeat_interleave(1)
        lend_room(cache, 0, SHAPES, like).count(1)
    assert lend_room(cache, 0, SHAPES, like).keys is not inference
