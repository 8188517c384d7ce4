"""The choice of tiles: the search that DCFORMER_AUTOTUNE=1 asks for, by a clock whose times are known."""

import itertools
import json
import warnings

import pytest
import torch
from kernel_device import DEVICE

from dcformer import ComposeWeights, SideWeights
from dcformer.kernels import composed_attention, passes, schemas, search, tuning
from dcformer.kernels import problem as problems
from dcformer.kernels.layout import Layout, Stage
from dcformer.kernels.overflow import NOTHING, Beyond
from dcformer.kernels.passes import Passes
from dcformer.kernels.problem import Visibility
from dcformer.kernels.tuning import Key, Tile

# of products and of composition: one tile that is best, one that is used otherwise, another
PRODUCTS = Tile(16, 16, 1, 1), Tile(32, 16, 1, 1), Tile(16, 32, 1, 1)
TILES = Tile(16, 1, 1, 1), Tile(16, 8, 1, 1), Tile(16, 8, 2, 1)
USUAL = Tile(16, 4, 1, 1)  # of lse, without a search
KEY = Key("compose", 90, 4, 128, "bfloat16", False, 11, 11, 2)


class Clock:
    """A trial whose times are known: the more the tile differs from the ones wanted, the longer."""

    wanted = (PRODUCTS[1], TILES[1])
    fails: tuple[Tile, ...] = ()
    tried: list = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, kernel, tile):
        self.kernel, self.tile = kernel, tile
        self.tried.append((kernel, tile))

    def launch(self, name, run):
        if name == self.kernel and self.tile in self.fails:
            raise RuntimeError("out of resource: shared memory")
        run()

    def milliseconds(self):
        return 1.0 + min(
            abs(self.tile.b_t - wanted.b_t)
            + abs(self.tile.b_s - wanted.b_s)
            + abs(self.tile.num_warps - wanted.num_warps)
            for wanted in self.wanted
        )


def tiles_of(kernel, usual=None):
    return PRODUCTS if kernel in ("scores", "values", "keys") else TILES


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """A search among three tiles, with a cache folder of its own."""
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "candidates", tiles_of)
    monkeypatch.setattr(search, "new_trial", Clock)
    monkeypatch.setattr(search, "_TURNS", 1)
    monkeypatch.setattr(problems, "LEAST_QUERIES", 1)
    monkeypatch.setattr(problems, "choose", lambda kernel, *_: USUAL if kernel == "lse" else tiles_of(kernel)[0])
    monkeypatch.setattr(Clock, "tried", [])
    monkeypatch.setattr(problems, "searched", set())
    monkeypatch.setattr(Clock, "fails", ())
    monkeypatch.setattr(passes.Passes, "_repeated", lambda self, name, run, given: run(*given))  # tests count launches
    tuning._found.cache_clear()
    yield tmp_path / "cache" / "tiles.json"
    tuning._found.cache_clear()


def problem(length=18, requires_grad=False):
    generator = torch.Generator().manual_seed(0)

    def new(*shape):
        return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_(requires_grad)

    q, k, v = (new(1, 2, length, 16) for _ in range(3))
    sides = [SideWeights.of(new(1, 2, length, 1), new(1, 2, length, 1), new(1, 2, length)) for _ in range(2)]
    return q, k, v, ComposeWeights(*sides), ComposeWeights(sides[0])


def test_the_fastest_tile_is_found_kept_and_used(tuned, monkeypatch):
    tensors = problem()
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "0")
    expected = composed_attention(*tensors)
    assert not Clock.tried and not tuned.exists()
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    found = composed_attention(*tensors)
    torch.testing.assert_close(found, expected)  # right while it searches

    kernels = {"scores", "lse", "compose", "values"}
    assert {name for name, _ in Clock.tried} == kernels
    assert {tile for _, tile in Clock.tried} == {*PRODUCTS, *TILES, USUAL}
    (tiles,) = json.loads(tuned.read_text()).values()
    assert len(tiles) == len(kernels)
    for key, numbers in tiles.items():  # kernel=...
        is_composition = tiles_of(key.split()[0].partition("=")[2]) is TILES
        assert Tile(*numbers) == Clock.wanted[is_composition]
    assert [path.name for path in tuned.parent.iterdir()] == ["tiles.json"]

    used = []
    real = passes.Passes._start
    monkeypatch.setattr(
        passes.Passes, "_start", lambda self, *args: (used.append(args[3]) if args[2] else None, real(self, *args))[1]
    )
    Clock.tried.clear()
    for _ in range(2):  # from memory, then from the file
        torch.testing.assert_close(composed_attention(*tensors), expected)
        tuning._found.cache_clear()
    assert not Clock.tried and set(used) == set(Clock.wanted)

    used.clear()
    composed_attention(*tensors)  # settled in this process: one pass
    count = len(used)
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "0")
    composed_attention(*tensors)
    assert len(used) == 2 * count


def test_a_search_waits_for_the_device_of_its_tensors(tuned, monkeypatch):
    """Whatever device is the current one: what it sleeps and waits on takes that."""
    entered, outside = [], []

    class Guard:
        def __init__(self, tensor):
            self.tensor = tensor

        def __enter__(self):
            entered.append(self.tensor.shape)

        def __exit__(self, *_):
            entered.pop()

    tensors, real = problem(), Clock.milliseconds
    monkeypatch.setattr(problems.torch.cuda, "device_of", Guard)
    monkeypatch.setattr(Clock, "milliseconds", lambda self: (outside.append(not entered), real(self))[1])
    composed_attention(*tensors)
    assert outside and not any(outside)


def test_the_call_that_searches_has_the_tiles_it_found(tuned, monkeypatch):
    used = []
    real = passes.Passes._start

    def start(self, *args):
        if self.trial is None and args[2]:
            used.append(args[3])
        return real(self, *args)

    monkeypatch.setattr(passes.Passes, "_start", start)
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    composed_attention(*problem())
    assert used and set(used) == set(Clock.wanted)


def test_gradients_are_right_while_the_backward_pass_is_searched(tuned, monkeypatch):
    results = []
    for value in ("0", "1"):
        monkeypatch.setenv("DCFORMER_AUTOTUNE", value)
        *states, pre, post = problem(requires_grad=True)
        composed_attention(*states, pre, post).square().sum().backward()
        leaves = [*states, pre.query.packed, pre.key.packed]
        results.append([leaf.grad for leaf in leaves])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    backward = {"scores", "values", "back_1", "back_0", "keys"}
    assert backward <= {name for name, _ in Clock.tried}


def test_tiles_that_fail_are_left_out(tuned, monkeypatch):
    monkeypatch.setattr(Clock, "fails", Clock.wanted)
    composed_attention(*problem())
    (tiles,) = json.loads(tuned.read_text()).values()
    assert all(Tile(*numbers) not in Clock.wanted for numbers in tiles.values())
    assert {tuple(numbers) for numbers in tiles.values()} == {(16, 16, 1, 1, 0), (16, 8, 2, 1, 0)}  # the next best
    tuning._found.cache_clear()
    tuned.unlink()
    problems.searched.clear()
    monkeypatch.setattr(Clock, "fails", PRODUCTS)
    with pytest.raises(RuntimeError, match=r"scores runs with none of 3 tiles.*Unset"):
        composed_attention(*problem())


def test_only_launches_of_the_kernel_on_trial_are_timed(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, stop):
            return 1.5

    monkeypatch.setattr(torch.cuda, "Event", Event)
    trial = search.Trial("lse", TILES[0])
    for name in ("scores", "lse", "compose", "lse"):
        trial.launch(name, lambda name=name: log.append(name))
    assert trial.milliseconds() == 3.0 and trial.launched == {"scores", "lse", "compose"}
    assert log == ["scores", "event", "lse", "event", "compose", "event", "lse", "event", "wait"]


def test_short_calls_and_captured_graphs_are_not_searched(tuned, monkeypatch):
    monkeypatch.setattr(problems, "LEAST_QUERIES", 19)
    composed_attention(*problem(18))
    assert not Clock.tried
    monkeypatch.setattr(problems, "LEAST_QUERIES", 1)
    monkeypatch.setattr(problems, "can_search", lambda tensor: False)
    composed_attention(*problem(18))
    assert not Clock.tried


def test_without_a_gpu_or_a_clock_there_is_no_search(monkeypatch):
    assert search.can_search(torch.zeros(1)) is False
    monkeypatch.setattr(search, "new_trial", Clock)
    assert search.can_search(torch.zeros(1)) is True
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert search.can_search(torch.zeros(1)) is False


def test_the_file_has_tiles_of_several_gpus_and_is_added_to(tuned):
    tuning.keep_tiles("A", {KEY: TILES[0]})
    tuning.keep_tiles("B", {KEY: TILES[1]})
    tuning._found.cache_clear()
    assert tuning.found_tile("A", KEY) == TILES[0] and tuning.found_tile("B", KEY) == TILES[1]
    assert tuning.found_tile("C", KEY) is None


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"A, triton": {"key": [1, 2]}}',
        '{"A": {"key": [16, 16, 4, 2]}}',
        '{"A": {"key": [16, 1, 4, 2, "x"]}}',
    ],
)
def test_a_broken_file_is_warned_of_and_ignored(tuned, content):
    tuned.parent.mkdir()
    tuned.write_text(content)
    with pytest.warns(UserWarning, match=r"tiles\.json is ignored.*Delete it"):
        assert tuning.found_tile("A", KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuning.keep_tiles("A", {KEY: TILES[0]})  # replaces it
    tuning._found.cache_clear()
    assert tuning.found_tile("A", KEY) == TILES[0]


def test_a_folder_that_cannot_be_written_is_warned_of(tuned, monkeypatch):
    tuned.parent.write_text("a file")
    with pytest.warns(UserWarning, match="cannot be written"):
        tuning.keep_tiles("A", {KEY: TILES[0]})
    assert tuning.found_tile("A", KEY) == TILES[0]  # of use in this process


def test_where_tiles_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("DCFORMER_CACHE", str(tmp_path))
    assert tuning.cache_file() == tmp_path / "tiles.json"
    monkeypatch.delenv("DCFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tuning.cache_file() == tmp_path / "xdg" / "dcformer" / "tiles.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuning.cache_file() == tmp_path / ".cache" / "dcformer" / "tiles.json"


@pytest.mark.parametrize("value", ["yes", "2", "true", " 1"])
def test_other_values_of_the_variable_are_errors(monkeypatch, value):
    monkeypatch.setenv("DCFORMER_AUTOTUNE", value)
    with pytest.raises(ValueError, match=f"DCFORMER_AUTOTUNE='{value}': expected 1 .* or 0"):
        composed_attention(*problem(5))


def test_as_many_keys_share_a_turn_as_registers_suffice_for(monkeypatch):
    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)

    def keys(heads=32, rank=2, arch=90, dtype=torch.bfloat16):
        return tuning.choose("lse", heads, 128, dtype, arch, rank).b_s

    assert keys(heads=16) == keys(arch=80) == keys(arch=80, rank=1) == keys(arch=80, rank=0) == keys(arch=120) == 4
    assert keys() == keys(rank=1) == keys(rank=3) == keys(rank=3, arch=80) == 2  # with 168 registers, or a larger rank
    assert keys(arch=100) == keys(arch=103) == 2 and keys(heads=16, arch=100) == 4
    assert keys(rank=4) == keys(rank=4, arch=80) == keys(heads=40) == keys(dtype=torch.float32) == 1


def test_products_with_copies_go_over_tokens_that_share_a_power_of_two(monkeypatch):
    """Each turn of their loops undoes one."""
    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
    archs, dtypes = (80, 89, 90, 100, 120), (torch.bfloat16, torch.float16)
    for arch, dim, dtype in itertools.product(archs, (16, 80, 128, 256), dtypes):
        for kernel, axis in (("values", "b_s"), ("keys", "b_t")):
            usual = tuning.choose(kernel, 32, dim, dtype, arch)
            tried = tuning.candidates(kernel, usual)
            assert len(tried) > 5 and {schemas.ROWS % getattr(tile, axis) for tile in (usual, *tried)} == {0}


@pytest.mark.parametrize("arch", [90, 100])
def test_a_search_tries_room_for_more_programs(monkeypatch, arch):
    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
    usual = tuning.choose("back_1", 32, 128, torch.bfloat16, arch)
    assert {tile.maxnreg for tile in tuning.candidates("back_1", usual)} == {255, 168}


def test_small_windows_have_small_tiles_of_scores(monkeypatch):
    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)

    def queries(window):
        return tuning.choose("scores", 32, 128, torch.bfloat16, 90, window=window).b_t

    assert [queries(window) for window in (1, 256, 1024, 1025, None)] == [64, 64, 64, 128, 128]
    bounds = torch.zeros(2, 1, 300, dtype=torch.int32)
    states = torch.empty(1, 2, 300, 16, device="meta", dtype=torch.bfloat16)
    for low, high, expected in ((-255, 0, 64), (-1024, 0, 128), (-(2**30), 0, 128), (-255, 2**30, 128)):
        problem = Passes(states, states, states, (Stage(), Stage()), Visibility(*bounds, low, high), Layout(0, 0), 1.0)
        assert problem._tile("scores").b_t == expected, (low, high)


def test_more_programs_run_at_once_where_few_registers_suffice(monkeypatch):
    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)

    def programs(kernel, heads, rank=2, arch=90, beyond=NOTHING):
        tile = tuning.choose(kernel, heads, 128, torch.bfloat16, arch, rank, beyond=beyond)
        return tuning.resident_programs(kernel, tile, arch)

    assert [programs(name, 32) for name in ("lse", "compose", "weights", "back_1", "back_0")] == [3, 3, 3, 2, 2]
    assert [programs(name, 16) for name in ("lse", "compose", "weights", "back_1", "back_0")] == [4, 4, 4, 3, 3]
    assert [programs("compose", *sizes) for sizes in ((16, 3), (32, 1), (32, 3), (40, 1))] == [3, 4, 2, 2]
    assert {programs(name, 32, arch=80) for name in ("lse", "compose", "back_0")} == {2}
    assert [programs(name, 16, arch=80) for name in ("lse", "compose", "weights", "back_1")] == [3, 4, 4, 2]
    # the compiler may take all registers
    assert programs("compose", 16, 4, arch=80) == programs("compose", 32, arch=120) == 2
    assert programs("compose", 16, arch=120) == 4
    assert [programs("compose", heads, arch=100) for heads in (16, 32)] == [8, 4], "of two warps"
    # weights in bfloat16, and scores in float32, take more registers
    of_stages = "lse", "compose", "weights"
    assert [programs(name, 32, beyond=Beyond.GRADIENTS) for name in of_stages] == [3, 2, 2]
    assert [programs(name, 16, beyond=Beyond.GRADIENTS) for name in (*of_stages, "back_1")] == [4, 2, 2, 3]
    assert {programs(name, 16, beyond=Beyond.PRECISION) for name in of_stages} == {2}
    assert tuning.launch_options(Tile(64, 2, 4, 3, 168)) == {"num_warps": 4, "num_stages": 3, "maxnreg": 168}
    assert tuning.launch_options(Tile(64, 1, 4, 4)) == {"num_warps": 4, "num_stages": 4}


def test_channels_that_are_held_in_16_bits():
    """Where that lets more programs run, or spares local memory."""
    found = {(heads, rank, arch): tuning.wide_channels(heads, rank, arch) for heads, rank, arch in itertools.product(
        (16, 32, 48, 64), (1, 2, 4), (80, 90))}  # fmt: skip
    assert {sizes for sizes, count in found.items() if count > sizes[1]} == {
        (16, 1, 80), (16, 1, 90), (16, 2, 80), (16, 2, 90), (16, 4, 80), (32, 1, 80), (32, 2, 80), (48, 1, 80),
        (64, 1, 80),
    }  # fmt: skip
    assert {sizes for sizes, count in found.items() if count == 0} == {
        (heads, rank, arch) for heads, rank in ((32, 4), (48, 4), (64, 2), (64, 4)) for arch in (80, 90)
    }
    for arch in (89, 100, 120):
        assert all(tuning.wide_channels(*sizes, arch) == count for (*sizes, of), count in found.items() if of == 80)


def test_keys_tell_windows_from_causal_attention_and_compositions_apart(monkeypatch):
    seen = []
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    monkeypatch.setattr(problems, "found_tile", lambda gpu, key: seen.append(key))
    q, k, v, pre, post = problem(20)
    for options in ({}, {"sliding_window": 4}, {"causal": False}, {"causal_offset": -3}):
        seen.clear()
        composed_attention(q, k, v, pre, post, **options)
        assert {key.windowed for key in seen} == {"sliding_window" in options}
        assert {(key.heads, key.dim, key.dtype, key.rank) for key in seen} == {(2, 16, "float32", 1)}
    seen.clear()
    composed_attention(q, k, v, pre)
    assert {key.post for key in seen} == {0}
