"""Addresses beyond 2^31: kernels over memory that is reserved but hardly touched, and launches that are not run.

From head to head and from map to map addresses have 64 bits; within a map, and within the weights of a group's heads,
32 bits do, and `Problem` sees to it that they suffice.
"""

import inspect
import mmap

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED

from dcformer.kernels import launch
from dcformer.kernels.launch import GATE, KEY, QUERY, STATIC, Layout, Problem, Visibility

FULL = QUERY | KEY | GATE
FAR = 2**30 + 16  # elements from one head to the next: itself below 2^31, three times that is above
FAR_MAPS = 2**31 + 16  # from one map to the next: the interpreter goes by the value, not by the declared int64


def reserved(like, strides):
    """A copy of a tensor with other strides, in memory whose pages exist once they are touched."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(like.shape, strides, strict=True))
    size *= like.element_size()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)
    return torch.as_strided(memory.view(like.dtype), like.shape, strides).copy_(like)


def values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


def problem(kind=Problem, strides=None):
    """Two sequences with four heads; queries, keys and values with other strides if there are any."""
    q, k, v = (values(2, 4, 18, 16, seed=i) for i in range(3))
    if strides:
        q, k, v = (reserved(t, strides) for t in (q, k, v))
    weights = [values(2, 4, 6, 18, seed=seed) for seed in (3, 4)]
    position = torch.arange(18, dtype=torch.int32)[None]
    seen = Visibility(torch.zeros_like(position), position + 1, high=0)
    return kind(q, k, v, *weights, None, None, seen, Layout(FULL, FULL, 1, 1), 0.25)


class Wide(Problem):
    """Launches with every map and tile FAR_MAPS from the next, as those of huge chunks are."""

    def _launch(self, name, chunk, maps, **arguments):
        names = ("p_tiles", "p_grads", "p_weight_grads", "p_composed")
        near = {key: t for key in names if torch.is_tensor(t := arguments.get(key))} | {"maps": maps}
        wide = {key: reserved(t, (t.shape[1] * FAR_MAPS, FAR_MAPS, t.shape[3], 1)) for key, t in near.items()}
        others = {key: t for key, t in wide.items() if key != "maps"}
        super()._launch(name, chunk, wide["maps"], **(arguments | others), stride_map=FAR_MAPS)
        for key, tensor in wide.items():
            near[key].copy_(tensor)


def passes(problem):
    out, lse = problem.forward()
    grads = problem.backward(values(*out.shape, seed=7), lse)
    return {"out": out, "lse": lse} | {name: t for name, t in vars(grads).items() if t is not None}


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="reserves memory of the CPU")
@pytest.mark.parametrize("strides", [(4 * FAR, FAR, 16, 1), (64, 16, FAR // 4, 1), (FAR * 4, 16, 64, 1)])
def test_states_beyond_2_to_the_31_elements(strides):
    expected, found = passes(problem()), passes(problem(strides=strides))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.skipif(not INTERPRETED or DEVICE != "cpu", reason="reserves memory of the CPU")
def test_maps_beyond_2_to_the_31_elements():
    expected, found = passes(problem()), passes(problem(Wide))
    for name in expected:  # equal but for what was never written
        assert torch.equal(found[name], expected[name]), name


# --- what is launched -------------------------------------------------------------------------------------------------


class Recorded:
    """Stands for a kernel: keeps the arguments of its launches."""

    def __init__(self, kernel, calls):
        self.kernel, self.arg_names, self.calls = kernel, kernel.arg_names, calls

    def __getitem__(self, grid):
        def launch(*args, **values):
            values = dict(zip(self.arg_names, args, strict=False)) | values
            self.calls.append((self.kernel.__name__, grid, values))

        return launch


@pytest.fixture
def calls(monkeypatch):
    """Launches are recorded, not run."""
    found = []
    recorded = {name: (Recorded(kernel, found), own) for name, (kernel, own) in launch.LAUNCHES.items()}
    monkeypatch.setattr(launch, "LAUNCHES", recorded)
    monkeypatch.setattr(launch.kernels, "join_kernel", Recorded(launch.kernels.join_kernel, found))
    return found


def huge(batch, heads, length, flags=FULL, groups=1, rank=2, dim=128, low=-(2**30), chunk_bytes=None, keys=None):
    keys = keys or length
    # every other row of a larger tensor: strides beyond 2^31
    new = {"device": "meta", "dtype": torch.bfloat16}
    q = torch.empty(batch, length, 2 * heads, dim, **new).transpose(1, 2)[:, ::2]
    k = torch.empty(batch, keys, 2 * heads, dim, **new).transpose(1, 2)[:, ::2]
    layout = Layout(flags, flags, groups, rank)
    wq, wk = (torch.empty(batch, heads, 2 * layout.channels, n, **new) for n in (length, keys))
    static = torch.empty(groups, heads // groups, heads // groups, **new) if flags & STATIC else None
    bounds = torch.empty(1, length, dtype=torch.int32, device="meta")
    return Problem(q, k, k, wq, wk, static, static, Visibility(bounds, bounds, low, 0), layout, 1.0, chunk_bytes)


HUGE = {
    "13B, 131072": (8, 40, 131072),
    "13B, 131072, groups, static": (8, 40, 131072, FULL | STATIC, 8),
    "33B, a million": (1, 52, 2**20),
    "all memory": (64, 40, 131072, FULL, 1, 2, 128, -(2**30), 2**45),
    "one head, all memory": (1, 1, 2**20, QUERY, 1, 1, 64, -(2**30), 2**45),
    "window, all memory": (1, 40, 2**20, FULL, 1, 2, 128, -255, 2**45),
    "many sequences": (100_000, 2, 64),
}


@pytest.mark.parametrize("name", HUGE)
def test_products_in_32_bits_stay_below_2_to_the_31(name, calls):
    """The products that kernels make of their arguments in 32 bits, at the last, largest chunk of either pass."""
    whole = huge(*HUGE[name])
    assert whole.B * whole.H * whole.T * whole.S > 2**31 or name == "many sequences"
    for maps in (4, 16 + 5 * whole.M):
        _, part = next(iter(whole._rows(maps)))
        *_, chunk = part.chunks(maps)
        assert chunk.n_t * chunk.n_s < 2**31 and chunk.n_t >= 64
        shape = (part.B, part.H, part.T)
        lse = torch.empty(shape, dtype=torch.float32, device="meta")
        out = torch.empty((*shape, part.DV), dtype=torch.bfloat16, device="meta")
        part._forward_chunk(chunk, out, lse)
        grads = [torch.empty(t.shape, dtype=torch.float32, device="meta") for t in (part.q, part.k, part.v)]
        rest = [t if t is None else torch.empty(t.shape, device="meta") for t in
                (part.wq, part.wk, *part.statics.values())]  # fmt: skip
        part._backward_chunk(chunk, out, lse, launch.Gradients(*grads, *rest))
    assert {kernel for kernel, _, _ in calls} >= {"lse_kernel", "join_kernel", "composed_kernel", "back_kernel"}
    for kernel, grid, values in calls:
        assert grid[0] < 2**31 and all(n <= 65535 for n in grid[1:]), (kernel, grid)
        if kernel == "join_kernel":
            continue  # one product, in 64 bits
        heads, channels = values["H"] // values["G"], values.get("C", 0)
        products = {
            "o_map": values["n_t"] * values["n_s"],
            "i_m * n_wq * T": heads * values["n_wq"] * values["T"],
            "i_m * n_wk * S": heads * values["n_wk"] * values["S"],
            "i_m * C * n_t": heads * channels * values["n_t"],
            "i_m * C * n_s": heads * channels * values["n_s"],
            "o_t, o_s": max(values["T"], values["S"]) + 128,
        }
        assert all(0 <= product < 2**31 for product in products.values()), (kernel, products)


def test_kernels_have_64_bits_between_maps_and_between_heads():
    """`stride_map` is declared so: its products with numbers of maps and heads are."""
    for kernel, _ in launch.LAUNCHES.values():
        kind = inspect.signature(kernel.fn).parameters["stride_map"].annotation
        assert "int64" in str(kind), kernel


def test_what_does_not_fit_says_so():
    with pytest.raises(ValueError, match=r"64 queries x 67108864 keys of a map are .* use shorter sequences"):
        huge(1, 1, 64, keys=2**26)
    with pytest.raises(ValueError, match=r"composition weights of 40 heads x 8388608 tokens are .* 2147483647"):
        huge(1, 40, 2**23)
