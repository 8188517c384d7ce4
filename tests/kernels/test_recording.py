"""Passes that are written down and repeated: in the interpreter, too, where launches are made to be repeatable."""

import ctypes
import dataclasses
from typing import Any

import pytest
import torch
from attention_cases import Case, stage_weights
from kernel_device import DEVICE, INTERPRETED
from torch.multiprocessing.reductions import StorageWeakRef

from dcformer.kernels import composed_attention, launch, overflow, passes, tuning
from dcformer.kernels import problem as problems
from dcformer.kernels.passes import Passes
from dcformer.kernels.recording import Recorded, Recording
from dcformer.kernels.repeated import start

pytestmark = pytest.mark.usefixtures("poison")
in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="would compile kernels for minutes")


class Watch:
    """Counts launches that are chosen, and keeps the most bytes of new tensors that were alive at once."""

    def __init__(self) -> None:
        self.chosen, self.most = 0, 0
        self._made: list[tuple[StorageWeakRef, int]] = []

    def made(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._made.append((StorageWeakRef(storage), storage.nbytes()))
        self.look()
        return tensor

    def look(self) -> None:
        self._made = [(storage, size) for storage, size in self._made if not storage.expired()]
        self.most = max(self.most, sum(size for _, size in self._made))

    def reset(self) -> None:
        self.chosen, self.most, self._made = 0, 0, []


@pytest.fixture
def watch(monkeypatch):
    """The interpreter's launches can be repeated, too."""
    watch, empty, new_kept = Watch(), torch.empty, passes.new_kept

    def interpreted(kernel, grid, values):
        dtypes = {name: x.dtype if isinstance(x, torch.Tensor) else None for name, x in values.items()}

        def run(*arguments):
            named = dict(zip(dtypes, arguments, strict=True))
            for name, dtype in dtypes.items():
                if dtype is not None:  # addresses, of which the interpreter has to know what is there
                    memory = (ctypes.c_char * dtype.itemsize).from_address(named[name])
                    named[name] = torch.frombuffer(memory, dtype=dtype)
            kernel[grid](**named)

        return run

    def started(kernel, grid, values, options, device):
        watch.chosen += 1
        return start(kernel, grid, values, options, device) or interpreted(kernel, grid, values)

    monkeypatch.setattr(launch, "start", started)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: watch.made(empty(*args, **kwargs)))
    monkeypatch.setattr(passes, "new_kept", lambda *args: watch.made(new_kept(*args)))
    return watch


def run(case, seed, save_maps=False, of_lse=False):
    """Output, log-sum-exp and gradients of other numbers of the same geometry."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (tensor + 0.3 * torch.randn(tensor.shape, generator=generator)).to(DEVICE, case.dtype).requires_grad_()
        for name, tensor in case.tensors().items()
    }
    grad = tensors.pop("grad").detach()
    pre, post = (stage_weights(tensors, stage, case.groups) for stage in ("pre", "post"))
    states = tensors["query"], tensors["key"], tensors["value"]
    out, lse = composed_attention(*states, pre, post, **case.options(), save_maps=save_maps, return_lse=True)
    loss = (out * grad).sum() + (lse[lse.isfinite()].sum() if of_lse else 0)
    return [out, lse, *torch.autograd.grad(loss, list(tensors.values()))]


def chosen_anew(self, name, run, given):
    """In place of `Passes._repeated`."""
    return run(*given)


def recorded():
    """How many passes are kept, to be repeated."""
    return sum(isinstance(kept, Recorded) for kept in passes._recorded.values())


CASES = {
    "all": (Case(length=18, static=True, groups=2), {}),
    "bfloat16, maps kept": (Case(length=18, heads=2, dtype=torch.bfloat16), {"save_maps": True}),
    "grouped-query, window, maps kept": (Case(length=40, heads=2, kv_heads=1, window=5), {"save_maps": True}),
    "no composition": (Case(length=18, heads=2, stages=()), {}),
    "query side": (Case(length=18, heads=2, sides=("query",)), {}),
    "a gate after the softmax": (Case(length=18, heads=2, stages=("post",), rank=0), {}),
    "padding": (Case(batch=2, length=18, heads=2, start=(0, 7)), {}),
    "keys that no chunk covers": (Case(length=7, keys=30, offset=5, heads=2), {}),
    "chunks": (Case(length=37, heads=2, chunk=16), {}),
    "chunks of the batch": (Case(batch=3, length=20, heads=2, chunk=16, start=(0, 5, 19)), {"save_maps": True}),
    "a group's static projection, chunks of the batch": (Case(batch=2, length=5, heads=2, chunk=16, static=True), {}),
}


SOME = ("bfloat16, maps kept", "grouped-query, window, maps kept", "chunks")


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=in_the_interpreter) for n in CASES])
def test_a_repeated_pass_is_the_pass(name, watch, monkeypatch):
    """Bit for bit, with other numbers, in no more memory, and with nothing chosen anew."""
    case, options = CASES[name]
    monkeypatch.setattr(problems, "FIRST_CHUNK", case.chunk or problems.FIRST_CHUNK)
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "_repeated", chosen_anew)
        expected = run(case, 1, **options)
    most = watch.most
    assert not passes._recorded and watch.chosen
    for seed in (2, 3):
        assert not recorded()
        run(case, seed, **options)
    assert recorded() == len(passes._recorded) == 2
    watch.reset()
    found = run(case, 1, **options)
    assert not watch.chosen and len(passes._recorded) == 2
    assert 0 < watch.most <= most
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert all((one == one).all() for one in found)  # nothing that was not written


@in_the_interpreter
def test_gradients_of_the_log_sum_exp_are_not_recorded(watch):
    case = Case(length=18, heads=2)
    expected = run(case, 1, of_lse=True)
    for _ in range(2):
        run(case, 2, of_lse=True)
    assert recorded() == 1 and len(passes._recorded) == 2  # the forward pass
    watch.reset()
    found = run(case, 1, of_lse=True)
    assert watch.chosen and all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@in_the_interpreter
def test_what_decides_is_not_repeated(watch, monkeypatch):
    """Everything that a pass is chosen by: each change is recorded, and gives what it gives by itself."""
    base = Case(length=5, heads=2)
    changes = (
        {}, {"length": 6, "keys": 5}, {"keys": 6}, {"kv_heads": 1}, {"dim": 20}, {"value_dim": 20}, {"causal": False},
        {"window": 3}, {"groups": 2}, {"sides": ("query",)}, {"gate": False}, {"rank": 1}, {"static": True},
        {"dtype": torch.bfloat16},
    )  # fmt: skip
    cases = [dataclasses.replace(base, **change) for change in changes]
    with monkeypatch.context() as patch:
        patch.setattr(Passes, "_repeated", chosen_anew)
        expected = [run(case, 1) for case in cases]
    for seed in (2, 3, 1):
        watch.reset()
        found = [run(case, seed) for case in cases]
    assert not watch.chosen and recorded() == len(passes._recorded) == 2 * len(cases)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def test_a_scale_and_chunks_decide(watch):
    """Numbers that no tensor has."""
    query, key, value = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(3))
    for _ in range(3):
        for i, options in enumerate(({}, {"scale": 0.5}, {"chunk_bytes": 1}, {"causal_offset": -1})):
            found = composed_attention(query, key, value, **options)
            expected = torch.softmax(
                (query @ key.mT * options.get("scale", 0.25)).masked_fill(
                    torch.ones(40, 40, device=DEVICE, dtype=torch.bool).triu(1 + options.get("causal_offset", 0)),
                    -torch.inf,
                ),
                -1,
            ).nan_to_num()
            assert (found - expected @ value).abs().max() < 1e-5, i
    assert recorded() == 4


@in_the_interpreter
def test_a_mark_has_a_pass_recorded_anew(watch, monkeypatch):
    """A pass that goes beyond float16 is run again with other maps, and so are those after it."""
    monkeypatch.setattr(overflow, "_found", {})
    monkeypatch.setattr(overflow, "_watches", {})
    query, key, value = (torch.randn(1, 2, 18, 16, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    for _ in range(2):
        composed_attention(query, key, value)
    assert recorded() == 1
    expected = composed_attention(300 * query, 300 * key, value)  # repeats that pass, finds the mark, and does another
    for _ in range(2):
        watch.reset()
        assert torch.equal(composed_attention(300 * query, 300 * key, value), expected)
    assert not watch.chosen and recorded() == 2


@in_the_interpreter
@pytest.mark.parametrize("by", ["a search", "another folder"])
def test_tiles_that_a_search_has_found_are_used(by, watch, monkeypatch, tmp_path):
    """Passes that were written down before are chosen anew."""
    found, launched = {}, []
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "first"))
    monkeypatch.setattr(problems, "found_tile", lambda gpu, key: found.get(key.kernel))
    fill_scores = Passes._fill_scores
    monkeypatch.setattr(
        Passes, "_fill_scores", lambda self, *args: launched.append(self._tile("scores")) or fill_scores(self, *args)
    )
    states = [torch.randn(1, 2, 18, 16, device=DEVICE) for _ in range(3)]
    expected = composed_attention(*states)
    for tile in (None, tuning.Tile(16, 32, 1, 1)):
        if tile is not None:
            found["scores"] = tile
            if by == "a search":
                tuning.keep_tiles("a GPU", {})
            else:
                monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "second"))
        for _ in range(3):
            watch.reset()
            assert torch.equal(composed_attention(*states), expected)
        assert not watch.chosen and launched[-1] == (tile or launched[0])
    assert recorded() == 2


def test_the_same_tensor_twice_is_not_two_tensors(watch):
    """Which of the tensors are one is part of what a pass is recorded for."""
    new = torch.randn(4, 1, 2, 18, 16, device=DEVICE).unbind()
    for _ in range(3):
        for states in (new[:3], (new[1], new[2], new[2]), (new[1], new[1], new[3]), (new[3], new[3], new[3])):
            found = composed_attention(*states)
            assert torch.equal(found, composed_attention(*[tensor.clone() for tensor in states]))  # three storages
    assert recorded() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch,queries", [(1, 0), (0, 3)])
def test_nothing_to_do(batch, queries, dtype, watch):
    """Empty tensors all lie at one address."""
    for _ in range(4):
        states = [torch.zeros(batch, 2, n, 16, dtype=dtype, device=DEVICE).requires_grad_() for n in (queries, 5, 5)]
        out, lse = composed_attention(*states, return_lse=True)
        assert (out.shape, lse.shape) == ((batch, 2, queries, 16), (batch, 2, queries))
        out.sum().backward()
        assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in states)


def test_long_passes_are_not_kept(watch, monkeypatch):
    monkeypatch.setattr(passes, "_MOST_STEPS", 2)
    for _ in range(3):
        composed_attention(*[torch.zeros(1, 1, 3, 16, device=DEVICE)] * 3)
    assert list(passes._recorded.values()) == [False] and watch.chosen == 3 * 4


def test_the_oldest_recording_is_forgotten(watch, monkeypatch):
    monkeypatch.setattr(passes, "_MOST_RECORDED", 2)
    for length in (3, 3, 4, 4, 5, 5, 3, 5):
        composed_attention(*[torch.zeros(1, 1, length, 16, device=DEVICE)] * 3)
    assert len(passes._recorded) == 2 and recorded() == 1 and watch.chosen == 7 * 4


# --- recordings of anything -------------------------------------------------------------------------------------------


def addresses(log: list) -> Any:
    return lambda *arguments: log.append(arguments)


def test_steps_are_repeated_in_their_order():
    log: list = []
    x, y = torch.zeros(3), torch.zeros(4, 2)
    recording = Recording([x, None, y])
    made = recording.new(torch.empty(2, 5))
    recording.launch(addresses(log), [x, 7, made[1:], y[2:], 0.5])
    made.zero_()
    recording.call(torch.Tensor.zero_, made)
    made[:, 1] += 2
    recording.call(lambda column: column.add_(2), made[:, 1])
    recorded = recording.finish([made.T, None])
    assert recorded is not None
    a, b = torch.ones(3), torch.ones(4, 2)
    found, nothing = recorded([a, None, b], a.device)
    assert nothing is None and torch.equal(found, made.T) and found.shape == (5, 2)
    assert log == [(a.data_ptr(), 7, found.data_ptr() + 20, b.data_ptr() + 16, 0.5)]
    assert found.data_ptr() != made.data_ptr()


def test_memory_is_given_back_when_nothing_needs_it():
    recording = Recording([])
    first, second = recording.new(torch.empty(10)), recording.new(torch.empty(10))
    recording.launch(lambda *_: None, [first, second])
    recording.launch(lambda *_: None, [second])
    last = recording.new(torch.empty(10))
    recording.launch(lambda *_: None, [last])
    recorded = recording.finish([last])
    assert recorded is not None
    assert [done for _, done in recorded.steps] == [[], [], [0], [1], [], []]


def elsewhere(recording, x):
    recording.launch(lambda *_: None, [torch.zeros(3)])
    return recording.new(torch.empty(2))


def interpreted(recording, x):
    recording.launch(None, [x])
    return recording.new(torch.empty(2))


def given_back(recording, x):
    """What lies where something of the pass lay is another's."""
    recording.new(torch.empty(64))
    others = [torch.empty(64) for _ in range(64)]
    assert not {StorageWeakRef(other.untyped_storage()) for other in others} & set(recording._made)
    recording.launch(lambda *_: None, others)
    return recording.new(torch.empty(2))


def another_dtype(recording, x):
    return recording.new(torch.empty(2)).view(torch.int32)


def as_it_was_given(recording, x):
    return x


def in_place_of_given(recording, x):
    recording.call(torch.Tensor.zero_, x)
    return recording.new(torch.empty(2))


@pytest.mark.parametrize(
    "spoil", [elsewhere, interpreted, given_back, another_dtype, as_it_was_given, in_place_of_given]
)
def test_what_cannot_be_repeated_is_not(spoil):
    x = torch.zeros(3)
    recording = Recording([x])
    assert recording.finish([spoil(recording, x)]) is None


def test_parts_of_tensors_that_share_memory_are_not_guessed():
    """A part is found in the tensor that it is of, but where two tensors have it."""
    memory, log = torch.zeros(6, 4), []
    recording = Recording([memory[:3], memory[3:]])
    recording.launch(addresses(log), [memory[3:], memory[4:5], memory[1:3]])
    recorded = recording.finish([])
    first, second = torch.zeros(3, 4), torch.zeros(3, 4)
    recorded([first, second], first.device)
    assert log == [(second.data_ptr(), second[1:].data_ptr(), first[1:].data_ptr())]
    recording = Recording([memory[:4], memory[3:]])
    recording.launch(addresses(log), [memory[3:], memory[:3]])
    assert recording.finish([]) is not None
    recording.launch(addresses(log), [memory[3:4]])
    assert recording.finish([]) is None
