"""What passes launch: chunks of queries and their bytes, layouts of maps, tiles of kernels."""

import dataclasses
import itertools
import weakref

import pytest
import torch
from attention_cases import SWITCHES, Case, fused, problem, run, stage_weights
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_device import DEVICE, HERE

from dcformer import SideWeights
from dcformer.kernels import composed_attention, launch, overflow, schemas
from dcformer.kernels import problem as problems
from dcformer.kernels.layout import Layout, Part, packed_weights, stages_of
from dcformer.kernels.overflow import Beyond
from dcformer.kernels.passes import Passes
from dcformer.kernels.tuning import KERNELS, Tile, candidates, choose

pytestmark = pytest.mark.usefixtures("poison")


@pytest.mark.parametrize("heads", [4, 34])
@pytest.mark.parametrize("found", [Beyond(0), *Beyond], ids=lambda found: found.name or "nothing")
def test_bytes_of_maps_are_those_of_a_chunk(heads, found, unmarked, monkeypatch):
    monkeypatch.setattr(overflow, "_found", {HERE: found})
    made, real = [], Passes._new_map

    def spy(self, chunk, dtype):
        out = real(self, chunk, dtype)
        alive = sum(size for *_, size, tensor in made if tensor() is not None) + out.nbytes
        made.append((self, chunk, alive, out.nbytes, weakref.ref(out)))
        return out

    monkeypatch.setattr(Passes, "_new_map", spy)
    case = Case(heads=heads, length=20, sides=("query",), rank=1, dtype=torch.bfloat16)
    tensors = {name: t.to(DEVICE, case.dtype).requires_grad_() for name, t in case.tensors().items()}
    pre, post = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
    out = composed_attention(tensors["query"], tensors["key"], tensors["value"], pre, post)
    for maps in (1, 3):
        problem, chunk, *_ = made[0]
        assert max(alive for _, _, alive, *_ in made) == problem.bytes_of_chunk(chunk, maps)
        made.clear()
        if maps == 1:
            out.sum().backward()


@pytest.mark.parametrize("heads", [2, 34])
def test_bytes_of_a_chunk_count_matrices(heads, unmarked, monkeypatch):
    """Those of scores are float32 with scores in two parts."""
    made, real = [], Passes._matrices
    monkeypatch.setattr(Passes, "_matrices", lambda self, *args: made.append((self, real(self, *args))) or made[-1][1])
    overflow._found[HERE] = Beyond.PRECISION
    case = Case(heads=heads, length=20, dtype=torch.bfloat16)
    tensors = {name: tensor.to(DEVICE, case.dtype) for name, tensor in case.tensors().items()}
    weights = (stage_weights(tensors, stage, 1) for stage in ("pre", "post"))
    composed_attention(tensors["query"], tensors["key"], tensors["value"], *weights)
    ((this, matrices),) = made
    (chunk,) = this.chunks(maps=1)
    maps = chunk.n_s * chunk.n_p * heads * (4 + 2)  # of scores, and W
    assert [m.dtype for m in matrices] == [torch.float32, torch.float16]
    assert this.bytes_of_chunk(chunk, 1) == maps + sum(m.nbytes for m in matrices)


@pytest.mark.parametrize("length", [1, 63, 1000, 4096])
@pytest.mark.parametrize("low", [-(2**30), -99])
@pytest.mark.parametrize("maps", [1, 3])
def test_chunks_cover_the_queries_and_keep_within_their_bytes(length, low, maps):
    full = Part.QUERY | Part.KEY | Part.GATE
    layout = Layout(full, full, 1, 2)
    this = problem(length, layout, low=low)
    chunks = this.chunks(maps)
    assert [i for chunk in chunks for i in range(chunk.t_0, chunk.t_0 + chunk.n_t)] == list(range(length))
    for chunk in chunks:
        stop = -(-min(length, chunk.t_0 + chunk.n_t) // 16) * 16  # s_0 is a multiple of 64, n_s of 16
        assert chunk.s_0 == max(0, chunk.t_0 + low) // 64 * 64 and chunk.s_0 + chunk.n_s == stop
        assert chunk.n_p == -(-chunk.n_t // this.unit) * this.unit
        matrices = 2 * 8 * 8  # of both stages, heads padded
        matrices += 8 * 8 * -(-chunk.n_t // this._tile("back_1").b_t) if maps == 3 else 0  # gradients for each tile
        size = 2 * chunk.n_s * (maps * 4 * chunk.n_p + matrices)
        assert size == this.bytes_of_chunk(chunk, maps) and (chunk.n_t <= 128 or size <= 1 << 20)
    if len(chunks) > 1:  # the whole does not fit
        assert length > 128 and this.bytes_of_chunk(this._chunk(0, length), maps) > 1 << 20


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 5000), keys=st.integers(1, 5000), offset=st.integers(-5000, 5000),
    window=st.none() | st.integers(1, 3000), bound=st.integers(0, 1 << 22), maps=st.sampled_from([1, 3]),
)  # fmt: skip
@example(length=4096, keys=512, offset=-1800, window=256, bound=1 << 18, maps=1)
@example(length=2060, keys=4096, offset=0, window=None, bound=1 << 22, maps=1)  # as with a static cache
def test_no_chunk_is_larger_than_its_bytes_whatever_its_queries_see(length, keys, offset, window, bound, maps):
    """The first and the last may see nothing, and those between them a whole window."""
    low = -(2**30) if window is None else offset + 1 - window
    this = problem(length, Layout(*(Part.QUERY | Part.KEY,) * 2, 1, 2), 4, bound, low, offset, keys)
    chunks = this.chunks(maps)
    assert all(chunk.n_t <= 128 or this.bytes_of_chunk(chunk, maps) <= bound for chunk in chunks)
    if len(chunks) > 1:  # twice as many queries would not fit
        n_t = 2 * chunks[0].n_t
        larger = [this._chunk(t_0, min(n_t, length - t_0)) for t_0 in range(0, length, n_t)]
        assert max(this.bytes_of_chunk(chunk, maps) for chunk in larger) > bound


@pytest.mark.parametrize("batch_bytes, expected", [(1 << 30, [slice(None)]), (1, [slice(0, 1), slice(1, 2)])])
def test_sequences_are_taken_together_where_they_fit(batch_bytes, expected):
    this = problem(63, Layout(Part.QUERY, 0, 1, 2), chunk_bytes=batch_bytes)
    assert [rows for rows, _ in this._rows(this.chunks(3), 3)] == expected


@pytest.mark.parametrize("name", ["everything", "post key", "no gate", "gate only", "static only", "nothing"])
def test_layouts_follow_from_the_weights(name):
    case = SWITCHES[name]
    pre, post = (stage_weights(case.tensors(), stage, case.groups) for stage in ("pre", "post"))
    weights, places = packed_weights(pre, post, case.kv_heads or case.heads)
    layout = Layout.of(stages_of(schemas.place_tensors(weights, places, 6)), case.groups)
    flags = sum({"query": Part.QUERY, "key": Part.KEY}[side] for side in case.sides) + Part.STATIC * case.static
    flags += Part.GATE * (case.gate and bool(case.sides))
    expected = [flags if stage in case.stages else 0 for stage in ("pre", "post")]
    rank = case.rank * (bool(case.stages) and bool(case.sides))
    assert [layout.pre, layout.post, layout.groups, layout.rank] == [*expected, case.groups, rank]
    assert layout.channels == (2 * rank + case.gate if case.stages and case.sides else 0)


@pytest.mark.parametrize(
    "kv_heads", [2, pytest.param(4, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", [None, 16])
def test_key_sides_behind_a_cache_are_as_good(kv_heads, groups, chunk, monkeypatch):
    """The same bits from a view of keys and values, and the same gradients."""
    case = Case(kv_heads=kv_heads, groups=groups, chunk=chunk, batch=2, keys=33)
    if chunk:
        monkeypatch.setattr(problems, "FIRST_CHUNK", chunk)
    expected = run(case, torch.float32, fused(case))

    def behind(side):
        packed = side.packed.unflatten(1, (kv_heads, -1)).permute(0, 1, 4, 2, 3).flatten(3)  # [B, Hkv, S, rep · 5]
        rows = torch.nn.functional.pad(packed, (8, 3))[..., 8:-3]  # behind a key, before the padding
        return SideWeights(rows.unflatten(3, (-1, 5)).permute(0, 1, 3, 4, 2))

    def attend(query, key, value, pre, post):
        pre, post = (dataclasses.replace(stage, key=behind(stage.key)) for stage in (pre, post))
        assert pre.key.packed.shape == (2, kv_heads, 4 // kv_heads, 5, 33) and pre.key.packed.stride(3) == 1
        return composed_attention(query, key, value, pre, post, **case.options())

    found = run(case, torch.float32, attend)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_kernel_has_a_tile(monkeypatch):
    from dcformer.kernels import tuning

    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
    assert set(KERNELS) == set(launch.LAUNCHES)
    for kernel, heads, dim, arch in itertools.product(
        KERNELS, (1, 32, 40), (16, 64, 80, 128, 256), (75, 80, 89, 90, 100, 120)
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tile = choose(kernel, heads, dim, dtype, arch)
            assert 16 <= tile.b_t <= 128 and tile.b_s >= (16 if "B_D" in launch.LAUNCHES[kernel][0].arg_names else 1)
    for kernel, dtype in itertools.product(KERNELS, (torch.float32, torch.bfloat16)):
        usual = choose(kernel, 32, 128, dtype, 90)
        tiles = candidates(kernel, usual)
        is_product = "B_D" in launch.LAUNCHES[kernel][0].arg_names
        assert usual in tiles or (is_product and dtype == torch.float32)
        assert is_product or {tile.b_t for tile in tiles} == {usual.b_t}  # which maps are laid out by


def test_tiles_of_composition_are_those_that_maps_are_laid_out_by(monkeypatch):
    """One that a search has found with another number of queries is not used."""
    from dcformer.kernels import tuning

    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    this, found = problem(64, Layout(Part.QUERY, Part.QUERY, 1, 2)), {}
    monkeypatch.setattr(problems, "found_tile", lambda gpu, key: found.get(key.kernel))
    usual = this._tile("compose")
    found["compose"] = Tile(2 * usual.b_t, 1, 8, 3)
    found["lse"] = Tile(usual.b_t, 2, 4, 5)
    # of a version whose copies had one power of two for all tokens
    found |= {"values": Tile(64, 128, 8, 3), "keys": Tile(128, 64, 8, 3), "scores": Tile(128, 128, 8, 3)}
    products = {name: this._tile(name) for name in ("values", "keys")} | {"scores": found["scores"]}
    assert products["values"] != found["values"] and products["keys"] != found["keys"]
    this._known.clear()
    assert this._tile("compose") == usual and this._tile("lse") == found["lse"]
    assert {name: this._tile(name) for name in products} == products
    for heads, dtype, arch in itertools.product((8, 40), (torch.float32, torch.bfloat16), (80, 89, 90, 100, 120)):
        sizes = {choose(kernel, heads, 64, dtype, arch).b_t for kernel in problems._COMPOSITION}
        assert len(sizes) == 1


def test_tiles_are_those_of_the_maps(monkeypatch):
    """What has been chosen for maps in 16 bits is not remembered when they become float32."""
    from dcformer.kernels import tuning

    monkeypatch.setattr(tuning, "_interpreter_tile", lambda kernel: None)
    this = problem(64, Layout(Part.QUERY, Part.QUERY, 1, 2))
    of_half, block = this._tile("compose"), this.block
    this.beyond = Beyond.SCORES
    assert this._tile("compose") == choose("compose", 4, 16, torch.float32, 90) != of_half
    assert this.unit < of_half.b_t and this.block <= block
    this.beyond = Beyond(0)
    assert this._tile("compose") == of_half
    this.beyond = Beyond.GRADIENTS
    assert this._tile("compose").maxnreg == 0 < of_half.maxnreg
    monkeypatch.setenv("DCFORMER_AUTOTUNE", "1")
    monkeypatch.setattr(problems, "found_tile", lambda gpu, key: of_half)
    for beyond in Beyond:
        this.beyond = beyond
        assert this._tile("compose") != of_half, "found for maps in 16 bits"
