"""Addresses beyond 2^31: kernels over memory that is reserved but hardly touched, and launches that are not run.

From key to key of a map, and from head to head of states, addresses have 64 bits; within a key of a map, and within the
weights of a group's heads, 32 bits do, and `Problem` sees to it that they suffice.
"""

import inspect
import mmap

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED

from dcformer import ComposeWeights, SideWeights
from dcformer.kernels import composed_attention, decode, launch, schemas
from dcformer.kernels import problem as problems
from dcformer.kernels.layout import Layout, Part, Stage, stages_of
from dcformer.kernels.passes import Passes
from dcformer.kernels.problem import Visibility

FULL = Part.QUERY | Part.KEY | Part.GATE
HEAD_STRIDE = 2**30 + 16  # elements from one head to the next: itself below 2^31, three times that is above
# From one key of a map to the next: itself beyond 2^31, as the interpreter goes by the value and not by the declared
# int64.
KEY_STRIDE = 2**31 + 16


def reserved(like, strides):
    """A copy of a tensor with other strides, in memory whose pages exist once they are touched."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, strides, strict=True))
    size *= like.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    return torch.as_strided(memory.view(like.dtype), like.shape, strides).copy_(like)


def values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def problem(kind=Passes, strides=None, groups=1, side_strides=None):
    """Two sequences with four heads; queries, keys and values, or key sides, with other strides if there are any."""
    q, k, v = (values(2, 4, 18, 16, seed=i) for i in range(3))
    if strides:
        q, k, v = (reserved(t, strides) for t in (q, k, v))
    weights = [values(2, 4, 3, 18, seed=3), values(2, 4, 1, 3, 18, seed=4), None]
    weights += [values(2, 4, 3, 18, seed=5), values(2, 4, 1, 3, 18, seed=6), None]
    if side_strides:
        weights[1::3] = [reserved(t, side_strides) for t in weights[1::3]]
    position = torch.arange(18, dtype=torch.int32)[None]
    seen = Visibility(torch.zeros_like(position), position + 1, high=0)
    return kind(q, k, v, stages_of(weights), seen, Layout(FULL, FULL, groups, 1), 0.25)


class Wide(Passes):
    """Launches with every key of a map KEY_STRIDE from the next, as those of huge chunks are."""

    def _start(self, kernel, grid, name, tile, values):
        is_product = "D" in values
        names = ("p_map",) if is_product else ("p_scores", "p_weights", "p_grads", "p_out")
        # others stand for what is not followed
        near = {key: values[key] for key in names if key in values and values[key].dim() == 5}
        wide = {}  # by address: some take the place of others
        for tensor in near.values():
            far = (tensor.shape[1] * KEY_STRIDE, KEY_STRIDE, *tensor.stride()[2:])
            wide.setdefault(tensor.data_ptr(), (tensor, reserved(tensor, far)))
        moved = {key: wide[tensor.data_ptr()][1] for key, tensor in near.items()}
        super()._start(kernel, grid, name, tile, values | moved | ({"stride_s": KEY_STRIDE} if near else {}))
        for tensor, there in wide.values():
            tensor.copy_(there)


def passes(problem):
    out, lse, *kept = problem.forward()
    grads = problem.backward(values(*out.transpose(1, 2).shape, seed=7), lse, *kept)
    of_weights = enumerate([*grads.weights[0], *grads.weights[1]])
    weights = {f"weight {i}": w for i, w in of_weights if w is not None}
    return {"out": out, "lse": lse, "query": grads.query, "key": grads.key, "value": grads.value} | weights


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="reserves memory of the CPU")
@pytest.mark.parametrize(
    "strides", [(4 * HEAD_STRIDE, HEAD_STRIDE, 16, 1), (64, 16, HEAD_STRIDE // 4, 1), (HEAD_STRIDE * 4, 16, 64, 1)]
)
def test_states_beyond_2_to_the_31_elements(strides):
    expected, found = passes(problem()), passes(problem(strides=strides))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="reserves memory of the CPU")
@pytest.mark.parametrize(
    "strides", [(4 * HEAD_STRIDE, HEAD_STRIDE, 3, 1, 24), (96, 24, 3, 1, HEAD_STRIDE // 4), (96, 24, 3, KEY_STRIDE, 1)]
)
def test_key_sides_beyond_2_to_the_31_elements(strides):
    expected, found = passes(problem()), passes(problem(side_strides=strides))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="reserves memory of the CPU")
@pytest.mark.parametrize("groups", [1, pytest.param(4, marks=pytest.mark.long)])
def test_maps_beyond_2_to_the_31_elements(groups):
    expected, found = passes(problem(groups=groups)), passes(problem(Wide, groups=groups))
    for name in expected:  # equal but for what was never written
        assert torch.equal(found[name], expected[name]), name


# --- what is launched -------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Launches are recorded, not run: name of the kernel, grid, arguments."""
    found = []
    monkeypatch.setattr(
        Passes, "_start", lambda self, kernel, grid, *args: found.append((kernel.__name__, grid, args[-1]))
    )
    return found


def huge(batch, heads, length, flags=FULL, groups=1, rank=2, dim=128, low=-(2**30), chunk_bytes=None, keys=None):
    keys = keys or length
    # every other row of a larger tensor: strides beyond 2^31
    new = {"device": "meta", "dtype": torch.bfloat16}
    q = torch.empty(batch, length, 2 * heads, dim, **new).transpose(1, 2)[:, ::2]
    k = torch.empty(batch, keys, 2 * heads, dim, **new).transpose(1, 2)[:, ::2]
    layout = Layout(flags, flags, groups, rank)
    side = torch.empty(batch, heads, layout.channels, length, **new)
    key_side = torch.empty(batch, heads, 1, layout.channels, keys, **new)
    static = torch.empty(groups, heads // groups, heads // groups, **new) if flags & Part.STATIC else None
    bounds = torch.empty(1, length, dtype=torch.int32, device="meta")
    weights = (Stage(side, key_side, static),) * 2
    return Passes(q, k, k, weights, Visibility(bounds, bounds, low, 0), layout, 1.0, chunk_bytes)


PRODUCTS = ("scores_kernel", "values_kernel", "keys_kernel")
HUGE = {
    "13B, 131072": (8, 40, 131072),
    "13B, 131072, groups, static": (8, 40, 131072, FULL | Part.STATIC, 8),
    "33B, a million": (1, 52, 2**20),
    "all memory": (64, 40, 131072, FULL, 1, 2, 128, -(2**30), 2**45),
    "one head, all memory": (1, 1, 2**20, Part.QUERY, 1, 1, 64, -(2**30), 2**45),
    "window, all memory": (1, 40, 2**20, FULL, 1, 2, 128, -255, 2**45),
    "many sequences": (100_000, 2, 64),
}


@pytest.mark.parametrize("name", HUGE)
def test_products_in_32_bits_stay_below_2_to_the_31(name, calls):
    """The products that kernels make of their arguments in 32 bits, at the last, largest chunk of either pass."""
    whole = huge(*HUGE[name])
    assert whole.B * whole.H * whole.T * whole.S > 2**31 or name == "many sequences"
    for maps in (1, 3):
        chunks = whole.chunks(maps)
        _, part = next(iter(whole._rows(chunks, maps)))
        chunk = chunks[-1]
        assert chunk.n_p * whole.H < 2**31 and chunk.n_t >= 64
        shape = (part.B, part.H, part.T)
        lse = torch.empty(shape, dtype=torch.float32, device="meta")
        out = torch.empty((*shape, part.DV), dtype=torch.bfloat16, device="meta")
        norms = schemas.new_norms(part.q, part.k)
        part._forward_chunk(chunk, part._values(norms), out, lse)
        grads = [torch.empty(t.shape, dtype=torch.float32, device="meta") for t in (part.q, part.k, part.v)]
        rest = [Stage(*(t if t is None else torch.empty(t.shape, device="meta") for t in s)) for s in part.weights]
        part._backward_chunk(chunk, part._sources(out, norms), lse, None, launch.Gradients(*grads, tuple(rest)))
    names = {f"{name}_kernel" for name in ("scores", "lse", "compose", "values", "keys", "back_1", "back_0")}
    assert {kernel for kernel, _, _ in calls} >= names
    for kernel, grid, values in calls:
        assert grid[0] < 2**31 and all(n <= 65535 for n in grid[1:]), (kernel, grid)
        heads = whole.M
        tiles, parts = (0, 0) if kernel in PRODUCTS else grid[:2]  # those have all in 64 bits
        products = {
            "o_t // UNIT * (H * UNIT)": (chunk.n_p + 128) * part.H,
            "o_h * (C * T)": heads * values.get("C", 0) * values.get("T", 0),
            "o_h * (C * S)": heads * values.get("C", 0) * values.get("S", 0),
            "o_h * T": heads * values.get("T", 0),
            "o_h * C * n_t": heads * values.get("C", 0) * values.get("n_t", 0),
            "i_s * n_bh": (1 + parts) * part.B * part.H,
            "i_t * n_bg": (1 + tiles) * part.B * part.G,
            "o_t, o_s": max(values.get("T", 0), values.get("S", 0)) + 128,
        }
        assert all(0 <= product < 2**31 for product in products.values()), (kernel, products)


def test_kernels_have_64_bits_from_key_to_key():
    """`stride_s` is declared so: its products with numbers of keys are."""
    for kernel, _ in launch.LAUNCHES.values():
        kind = inspect.signature(kernel.fn).parameters["stride_s"].annotation
        assert "int64" in str(kind), kernel


def test_strides_of_masks_have_64_bits():
    """A repeated launch has others than the one that was compiled."""
    for kernel in (decode.scores_kernel, decode.output_kernel):
        parameters = inspect.signature(kernel.fn).parameters
        assert all("int64" in str(parameters[f"stride_a{axis}"].annotation) for axis in "bts"), kernel


def test_what_does_not_fit_says_so():
    huge(1, 1, 64, keys=2**26)  # as many keys as there is memory for
    with pytest.raises(ValueError, match=r"composition weights of 64 heads x 4194304 tokens are .* 2147483647"):
        huge(1, 64, 2**22, rank=4)


# --- what is read and written -----------------------------------------------------------------------------------------


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="looks at addresses of the CPU")
@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        pytest.param((64, 128), {"causal_offset": 200, "sliding_window": 50}, id="windows behind all keys"),
        pytest.param((150, 150), {"sliding_window": 30, "key_end": [40, 150]}, id="padding longer than a window"),
        pytest.param((70, 70), {"key_start": [33, 0], "key_end": [60, 5]}, id="both paddings"),
        pytest.param((50, 50), {"cu_seqlens": [0, 7, 30], "sliding_window": 9}, id="documents that end early"),
        pytest.param((37, 61), {"causal": False}, id="odd, not causal"),
    ],
)
def test_nothing_is_read_or_written_outside_of_tensors(sizes, options, accesses, monkeypatch):
    """A number that is masked later may be read from anywhere, and results are right: a GPU would end the process."""
    monkeypatch.setattr(problems, "FIRST_CHUNK", 64)
    generator = torch.Generator().manual_seed(0)
    batch = 1 if "cu_seqlens" in options else 2

    def new(*shape):
        return torch.randn(shape, generator=generator).to(torch.bfloat16).requires_grad_()

    def weights():
        sides = [SideWeights.of(new(batch, 2, n, 1), new(batch, 2, n, 1), new(batch, 2, n)) for n in sizes]
        return ComposeWeights(*sides)

    query, key, value = (new(batch, 2, n, 12) for n in (sizes[0], sizes[1], sizes[1]))
    given = {name: torch.tensor(n, dtype=torch.int32) if isinstance(n, list) else n for name, n in options.items()}
    composed_attention(query, key, value, weights(), weights(), chunk_bytes=0, **given).sum().backward()
    assert {"scores_kernel", "values_kernel", "back_1_kernel", "back_0_kernel"} <= accesses.kernels
