"""Decoding kernels against eager attention in float64, on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)."""

import re
from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, INTERPRETED

from dcformer import DCFormerConfig
from dcformer.attention_dcformer import eager_attention
from dcformer.compose_dcformer import ComposeWeights, DCFormerCompose, SideWeights
from dcformer.kernels import decode, schemas
from dcformer.kernels.decode import composed_decode
from dcformer.kernels.layout import packed_weights

pytestmark = pytest.mark.usefixtures("poison", "accesses")
FULL = ("query_maps", "query_gates", "key_maps", "key_gates")


class _Module:
    is_causal = False
    training = False


# --- inputs -----------------------------------------------------------------------------------------------------------


def normal(*shape, dtype):
    return torch.randn(shape).to(DEVICE, dtype)


def stage(B, H, T, S, R, dtype, groups=1, parts=FULL):
    """Composition weights with the named parts, as large as trained ones get."""

    def side(name, length):
        maps, gates = f"{name}_maps" in parts, f"{name}_gates" in parts
        if not maps and not gates:
            return None
        return SideWeights.of(
            normal(B, H, length, R, dtype=dtype) if maps else None,
            normal(B, H, length, R, dtype=dtype) * 0.3 if maps else None,
            torch.tanh(normal(B, H, length, dtype=dtype)) if gates else None,
        )

    m = H // groups
    static = normal(groups, m, m, dtype=dtype) * m**-0.5 if "static" in parts else None
    return ComposeWeights(side("query", T), side("key", S), static, groups)


def inputs(B=1, H=4, KV=None, T=1, S=40, D=16, DV=None, R=2, groups=1, dtype=torch.bfloat16, parts=FULL):
    """query, key, value, pre, post."""
    KV = KV or H
    q, k, v = (normal(B, h, n, d, dtype=dtype) for h, n, d in ((H, T, D), (KV, S, D), (KV, S, DV or D)))
    return q, k, v, *(stage(B, H, T, S, R, dtype, groups, parts) for _ in range(2))


def as_float64(weights):
    """The same weights in float64 on the CPU."""

    def side(s):
        return None if s is None else SideWeights(s.packed.cpu().double())

    if weights is None:
        return None
    static = None if weights.static is None else weights.static.cpu().double()
    return ComposeWeights(side(weights.query), side(weights.key), static, weights.groups)


# --- comparison -------------------------------------------------------------------------------------------------------


def eager(q, k, v, pre, post, visible=None):
    return eager_attention(_Module, q, k, v, visible, q.shape[-1] ** -0.5, pre=pre, post=post)[0]


def exact(q, k, v, pre, post, visible=None):
    q, k, v = (x.cpu().double() for x in (q, k, v))
    return eager(q, k, v, as_float64(pre), as_float64(post), None if visible is None else visible.cpu())


def errors(output, yardstick):
    """The largest error, and the root of the mean square."""
    difference = output.cpu().double() - yardstick
    return torch.stack([difference.abs().max(), difference.square().mean().sqrt()])


def bounds(arguments, yardstick, visible=None):
    """What eager attention itself is off by in this dtype, twice, and one rounding of the result."""
    magnitude = torch.stack([yardstick.abs().max(), yardstick.square().mean().sqrt()])
    own = errors(eager(*arguments, visible), yardstick)
    return 2 * own + torch.finfo(arguments[0].dtype).eps * magnitude


def run(arguments, visible=None, num_splits=None):
    """The output as `eager_attention` has it, [B, T, H, DV]."""
    scale = arguments[0].shape[-1] ** -0.5
    return composed_decode(*arguments, scale=scale, visible=visible, num_splits=num_splits).transpose(1, 2)


def check(arguments, visible=None, num_splits=(None,)):
    """Compares with eager in float64 for each number of splits; returns (yardstick, bounds)."""
    yardstick = exact(*arguments, visible)
    allowed = bounds(arguments, yardstick, visible)
    for n in num_splits:
        for _ in range(1 if INTERPRETED else 2):  # a second call repeats the launches of the first
            output = run(arguments, visible, n)
        assert output.shape == yardstick.shape and output.dtype == arguments[0].dtype and output.is_contiguous()
        assert (errors(output, yardstick) <= allowed).all(), (n, errors(output, yardstick), allowed)
    return yardstick, allowed


# --- numbers ----------------------------------------------------------------------------------------------------------

PARTS = [
    (),
    ("query_maps",),
    ("query_gates",),
    ("key_maps",),
    ("key_gates",),
    ("static",),
    ("query_maps", "key_maps"),
    ("query_gates", "key_gates"),
    ("query_maps", "query_gates"),
    ("key_maps", "key_gates"),
    (*FULL, "static"),
]


@pytest.mark.parametrize("stages", ["pre", "post", "both"])
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_each_switch(parts, stages):
    q, k, v, pre, post = inputs(parts=parts, S=20)
    arguments = [q, k, v, pre if stages != "post" else None, post if stages != "pre" else None]
    yardstick, allowed = check(arguments)
    for part in parts:  # each of them matters: without it the result is far outside what is allowed
        for i in (3, 4):
            if arguments[i] is None:
                continue
            weights = arguments[i]
            if part == "static":
                fewer = replace(weights, static=None)
            else:
                name, kind = part.split("_")
                side = getattr(weights, name)
                rest = {"down": side.down, "up": side.up} if kind == "gates" else {"gate": side.gate}
                rest = None if all(w is None for w in rest.values()) else SideWeights.of(**rest)
                fewer = replace(weights, **{name: rest})
            without = exact(*arguments[:i], fewer, *arguments[i + 1 :])
            assert (errors(without, yardstick) > 3 * allowed).all(), (part, i)


def test_sides_may_be_absent():
    q, k, v, pre, post = inputs(T=2)
    check([q, k, v, replace(pre, query=None), replace(post, key=None)])
    check([q, k, v, replace(pre, key=None), replace(post, query=None)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 3])
def test_dtypes(dtype, T):
    """Of several rows: the largest of few errors is up to chance, in float32 by three times what eager's is."""
    check(inputs(B=8, T=T, S=33, dtype=dtype, parts=(*FULL, "static")), num_splits=(1, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("T", [1, 2])
def test_rounds_where_eager_does(dtype, T):
    """Composed weights are rounded before they meet the values, the output once: nearly all numbers are the same."""
    arguments = inputs(T=T, S=63, D=64, dtype=dtype)
    assert (run(arguments, num_splits=2) == eager(*arguments)).float().mean() > 0.97


SHAPES = {
    "one head": {"H": 1},
    "six heads": {"H": 6, "S": 63},
    "twelve heads, rank 1": {"H": 12, "R": 1, "S": 17},
    "24 heads, rank 3": {"H": 24, "R": 3, "S": 33},
    "40 heads": {"H": 40, "S": 33},
    "52 heads, rank 4": {"H": 52, "R": 4, "S": 17},
    "52 heads, static, 3 queries": {"H": 52, "T": 3, "S": 17, "parts": (*FULL, "static")},
    "head dim 80": {"D": 80, "S": 111},
    "head dim 96, 3 queries": {"D": 96, "S": 111, "T": 3, "dtype": torch.float16},
    "head dim 100": {"D": 100, "S": 20},
    "head dim 256": {"D": 256, "S": 20},
    "head dim 256, 3 queries": {"D": 256, "S": 20, "T": 3},
    "head dims differ": {"D": 16, "DV": 40, "S": 33},
    "one key": {"S": 1},
    "one key, 16 queries": {"S": 1, "T": 16},
    "63 keys, 16 queries": {"S": 63, "T": 16, "dtype": torch.float16},
    "16 queries, float32": {"S": 17, "T": 16, "dtype": torch.float32},
    "grouped queries": {"H": 8, "KV": 2, "S": 63},
    "grouped queries, float32": {"H": 8, "KV": 2, "S": 33, "T": 3, "dtype": torch.float32},
    "one key head for 24, 3 queries": {"H": 24, "KV": 1, "T": 3, "S": 33},
    "groups": {"H": 8, "groups": 2, "S": 63, "B": 2, "parts": (*FULL, "static")},
    "groups of one head": {"H": 4, "groups": 4, "S": 33},
    "groups within key heads": {"H": 12, "KV": 2, "groups": 6, "S": 33, "T": 2},
    "groups across key heads": {"H": 12, "KV": 3, "groups": 2, "S": 33, "parts": (*FULL, "static")},
    "batch": {"B": 5, "S": 33},
    "batch of 64": {"B": 64, "H": 2, "S": 20},
    "batch of 256": {"B": 256, "H": 1, "S": 17},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes(shape):
    check(inputs(**shape), num_splits=(2,))


@pytest.mark.parametrize("H, KV, groups", [(8, 8, 1), (8, 2, 1), (8, 8, 2)])
def test_without_composition(H, KV, groups):
    q, k, v, pre, _ = inputs(H=H, KV=KV, groups=groups, T=2, S=33)
    check([q, k, v, None, None], num_splits=(2,))
    check([q, k, v, pre, None], num_splits=(2,))


@pytest.mark.parametrize("T", [1, 3])
def test_number_of_splits(T):
    arguments = inputs(H=6, T=T, S=63, D=16, dtype=torch.float16)
    check(arguments, num_splits=(None, 1, 2, 3, 1000))  # 63 keys are at most 4 splits
    assert torch.equal(run(arguments, num_splits=3), run(arguments, num_splits=3))


def test_split_lengths():
    assert decode.split_keys(1, 1, 2048, 256.0) == (128, 16)  # no shorter than 16 keys
    assert decode.split_keys(1, 1, 32768, 256.0) == (256, 128)  # two waves
    assert decode.split_keys(64, 1, 2048, 256.0) == (5, 416)
    assert decode.split_keys(256, 1, 2048, 256.0) == (2, 1024)
    assert decode.split_keys(1, 16, 2048, 256.0) == (64, 32)  # more splits than that are more to read
    for programs in (1, 3, 64, 1000):
        for keys in (1, 15, 16, 17, 1000, 32768):
            for wanted in (None, 1, 5, 10**6):
                count, length = decode.split_keys(programs, 1, keys, 256.0, wanted)
                assert length % 16 == 0 and (count - 1) * length < keys <= count * length
                assert count <= (wanted or 10**9)


# --- visibility -------------------------------------------------------------------------------------------------------


def patterns(B, T, S):
    """Masks by name."""
    keys, queries = torch.arange(S), torch.arange(S - T, S)[:, None]
    causal = (keys <= queries)[None, None]
    padded = causal & (keys >= torch.tensor([S // 2, 3])[:, None, None, None])
    ring = causal.roll(S // 3, dims=-1) & (keys % 2 == 0)
    ahead = (keys < S // 4).expand(1, 1, T, S)  # a static cache, mostly unfilled
    middle = ((keys >= S // 2) & (keys < S // 2 + 3)).expand(1, 1, T, S)
    some = torch.rand(B, 1, T, S) < 0.3
    some[0, 0, 0] = False
    nothing = torch.zeros(1, 1, T, S, dtype=torch.bool)
    return {
        "causal": causal,
        "left padding": padded,
        "ring": ring,
        "unfilled": ahead,
        "middle": middle,
        "some rows empty": some,
        "nothing": nothing,
    }


@pytest.mark.parametrize("name", patterns(2, 1, 8))
@pytest.mark.parametrize("T", [1, 3])
def test_visibility(name, T):
    S = 63
    visible = patterns(2, T, S)[name].to(DEVICE)
    parts = (*FULL, "static") if name == "ring" else FULL
    arguments = inputs(B=2, T=T, S=S, dtype=torch.float16, parts=parts)
    check(arguments, visible, num_splits=(3,))
    empty = ~visible.any(-1)[:, 0].expand(2, T)
    assert (run(arguments, visible, 2)[empty] == 0).all()


def test_visible_of_any_strides():
    wide = torch.rand(2, 1, 3, 40, 2, device=DEVICE) < 0.5
    wide[..., 0, :] = True
    arguments = inputs(B=2, T=3, S=40)
    check(arguments, wide[..., 1], num_splits=(2,))
    check(arguments, wide[:1, ..., 1], num_splits=(2,))


def test_unseen_keys_are_not_read():
    """Splits that no query sees are skipped: even NaN there does no harm."""
    q, k, v, pre, post = inputs(S=96)
    visible = (torch.arange(96, device=DEVICE) < 32).view(1, 1, 1, 96)
    expected = run([q, k, v, pre, post], visible, 3)
    k[:, :, 32:] = v[:, :, 32:] = float("nan")
    for stage in (pre, post):
        stage.key.packed[..., 32:] = float("nan")
    assert torch.equal(run([q, k, v, pre, post], visible, 3), expected)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("KV, gate, projection", [(4, True, True), (2, True, True), (4, False, True), (4, True, False)])
def test_packed_cache(KV, gate, projection):
    """Views of cache rows, as `DCFormerCompose` makes them; the cache is longer than what is read."""
    config = DCFormerConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=KV, compose_gate=gate, compose_projection=projection
    )
    compose = DCFormerCompose(config)
    parts = tuple(p for p in FULL if ("gate" in p and gate) or ("maps" in p and projection))
    q, k, v, pre, post = inputs(B=2, KV=KV, S=63, parts=parts)
    views = []
    for states, weights, name in ((k, pre, "pre"), (v, post, "post")):
        packed = compose.pack(states, weights.key, name)
        cache = torch.full((2, KV, 80, packed.shape[-1]), float("nan"), dtype=packed.dtype, device=DEVICE)
        cache[:, :, :63] = packed
        states, side = compose.unpack(cache[:, :, :63], states.shape[-1], name)
        assert not states.is_contiguous()
        views.append((states, replace(weights, key=side)))
    (k, pre), (v, post) = views
    check([q, k, v, pre, post], num_splits=(1, 3))
    first, second, *_ = launches(q, k, v, pre, post)
    for launch, side in ((first, pre.key), (second, post.key)):  # nothing is copied; pairs are one load where aligned
        assert launch.arguments["p_wk"].data_ptr() == side.packed.data_ptr()
        assert launch.constants["PAIRS"] == (KV == 4 and projection)


def launches(q, k, v, pre, post):
    """What one call launches."""
    weights = schemas.place_tensors(*packed_weights(pre, post, k.shape[1]), 6)
    return decode.launches(q, k, v, *weights, None, None, 1, 1.0, 1)[1]


def test_any_strides():
    def odd(*shape):
        """The same shape as a view with the dimensions before the last one reversed, from an odd offset."""
        *front, last = shape
        memory = torch.randn(*reversed(front), last + 3).to(DEVICE, torch.bfloat16)[..., 3:]
        return memory.permute(*reversed(range(len(front))), len(front))

    B, H, S, R = 2, 4, 33, 2
    for T in (1, 3):
        sides = [SideWeights(odd(B, H, n, 2 * R + 1).transpose(2, 3)) for n in (T, S, T, S)]
        sides[3] = SideWeights(odd(B, H, 2 * R + 1, S))  # from the generators: tokens are neighbors
        pre, post = ComposeWeights(*sides[:2]), ComposeWeights(*sides[2:])
        check([odd(B, H, T, 16), odd(B, H, S, 16), odd(B, H, S, 16), pre, post], num_splits=(2,))


def test_weights_at_the_end_of_memory():
    """Rows of 2R + 1 without padding: the last one ends where the storage does, and nothing beyond is read."""
    q, k, v, pre, post = inputs()
    for weights in (pre, post):
        weights.key = SideWeights(weights.key.packed.transpose(2, 3).contiguous().transpose(2, 3))
    check([q, k, v, pre, post])
    launch = launches(q, k, v, pre, post)[0]
    assert not launch.constants["PAIRS"] and launch.arguments["p_wk"].data_ptr() == pre.key.packed.data_ptr()


@pytest.mark.skipif(not INTERPRETED, reason="needs sparse memory, which is the CPU's")
def test_offsets_beyond_int32(tmp_path):
    """Batch rows more than 2**31 elements apart, in a sparse file."""
    q, k, _, pre, post = inputs(B=2, S=17)
    far = 2**31 + 64
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=far + k[0].numel(), dtype=k.dtype)
    distant = memory.as_strided(k.shape, (far, *k.stride()[1:]))
    distant.copy_(k)
    assert torch.equal(run([q, distant, distant, pre, post]), run([q, k, k, pre, post]))


def test_nothing_to_do():
    assert run(inputs(B=0)).shape == (0, 1, 4, 16) and run(inputs(T=0)).shape == (1, 0, 4, 16)
    assert (run(inputs(S=0, T=2)) == 0).all()


# --- as an operator ---------------------------------------------------------------------------------------------------


def test_operator_is_well_behaved():
    q, k, v, pre, post = inputs(T=2, S=20, parts=(*FULL, "static"))
    visible = torch.rand(1, 1, 2, 20, device=DEVICE) < 0.5
    weights, places = packed_weights(pre, post, 4)
    torch.library.opcheck(schemas.decode_op, (q, k, v, weights, visible, [1, 2, *places], 0.25))


def test_the_operator_is_opaque_where_graphs_break():
    """A frame that Dynamo leaves to Python may call the operator; what launches its kernels is never traced."""
    q, k, v, pre, post = inputs(S=37)
    weights, places = packed_weights(pre, post, k.shape[1])

    def call(query):
        out = query.new_zeros(())
        for _ in range(2):
            try:
                torch._dynamo.graph_break()
                out = out + schemas.decode_op(query, k, v, weights, None, [1, -1, *places], 0.25)
            finally:
                pass
        return out

    assert torch.equal(torch.compile(call)(q), call(q))


@pytest.mark.parametrize("name", ["composed_decode", "generate_packed", "prepare_decode"])
def test_operators_are_fit_for_graphs(name):
    assert torch.Tag.pt2_compliant_tag in getattr(torch.ops.dcformer, name).default.tags


def test_a_backward_pass_through_the_operator_is_an_error():
    q, k, v, pre, post = inputs(S=37)
    weights, places = packed_weights(pre, post, k.shape[1])
    for given in (q, v, weights[0]):
        given.requires_grad_()
        out = schemas.decode_op(q, k, v, weights, None, [1, -1, *places], 0.25)
        with pytest.raises(RuntimeError, match="composed_decode has no backward pass"):
            (out.sum() + given.sum()).backward()
        given.requires_grad_(False)


def test_compiles_without_graph_breaks():
    def step(q, k, v, gate, visible):
        return 2 * composed_decode(q, k, v, ComposeWeights(SideWeights.of(gate=gate)), scale=0.25, visible=visible)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for S in (20, 33):
        q, k, v, pre, _ = inputs(S=S)
        visible = torch.rand(1, 1, 1, S, device=DEVICE) < 0.5
        with torch.no_grad():
            expected = step(q, k, v, pre.query.gate, visible)
            assert torch.equal(compiled(q, k, v, pre.query.gate, visible), expected)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_captured_in_a_cuda_graph():
    arguments = inputs(B=2, H=8, S=300, D=64)
    visible = torch.rand(2, 1, 1, 300, device=DEVICE) < 0.5
    run(arguments, visible)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run(arguments, visible)
    for _ in range(2):
        for tensor in arguments[:3]:
            tensor.normal_()
        visible.copy_(torch.rand(2, 1, 1, 300, device=DEVICE) < 0.5)
        graph.replay()
        assert torch.equal(output, run(arguments, visible))


# --- errors -----------------------------------------------------------------------------------------------------------


def refused(message, arguments=None, **options):
    with pytest.raises(ValueError, match=message):
        composed_decode(*(arguments or inputs()), **({"scale": 0.25} | options))


def test_errors_name_what_is_wrong():
    q, k, v, pre, post = inputs()
    refused(r"key \(1, 3, 40, 16\).*multiple of Hkv", (q, k[:, :3], v[:, :3], pre, post))
    refused(r"value \(1, 4, 39, 16\)", (q, k, v[:, :, 1:], pre, post))
    refused("at most 16 queries per sequence, not 17.*composed_attention", inputs(T=17))
    refused("head dim 272.*at most 256.*dcformer_chunked", inputs(D=272))
    refused("rank 5.*ranks of 1 to 4", inputs(R=5))
    refused("torch.float64.*expected one of.*eager", inputs(dtype=torch.float64))
    refused("torch.float32 and torch.bfloat16", (q, k.float(), v, pre, post))
    refused("key has strides.*contiguous", (q, k.mT.contiguous().mT, v, pre, post))
    refused(r"visible is torch.float32 \(1, 1, 1, 40\)", visible=torch.zeros(1, 1, 1, 40, device=DEVICE))
    refused(r"visible is torch.bool \(1, 1, 1, 41\)", visible=torch.ones(1, 1, 1, 41, device=DEVICE).bool())
    refused("num_splits=0", num_splits=0)
    refused("num_splits=2.5: expected an integer", num_splits=2.5)
    refused("num_splits=True: expected an integer", num_splits=True)
    refused("scale='a': expected a finite number", scale="a")
    for scale in (float("inf"), 1e39, -(10**400)):
        refused(f"scale={re.escape(str(scale))}: expected a finite number", scale=scale)
    refused("query is on .* and visible on meta", visible=torch.ones(1, 1, 1, 40, device="meta").bool())
    refused("pre is of type SideWeights: expected ComposeWeights", (q, k, v, pre.query, post))
    refused("pre.key is of type Tensor: expected SideWeights", (q, k, v, replace(pre, key=pre.key.packed), post))
    refused("key has the layout torch.sparse_coo: expected a dense", (q, k.to_sparse(), v, pre, post))
    refused("query is of type list: expected a tensor", ([1], k, v, pre, post))
    refused("visible is of type list: expected a tensor", visible=[True])
    refused("pre and post have 2 and 1 groups", (q, k, v, replace(pre, groups=2), post))
    refused("pre.groups=3 must be an integer that divides 4", (q, k, v, replace(pre, groups=3), None))
    refused("pre.groups=2.0 must be an integer", (q, k, v, replace(pre, groups=2.0), None))
    three_heads = replace(pre, query=SideWeights(pre.query.packed[:, 1:]))
    refused(r"pre.query holds torch.bfloat16 \(1, 3, 5, 1\).*\(1, 4, channels, 1\)", (q, k, v, three_heads, post))
    other_heads = replace(pre, key=SideWeights(pre.key.packed.unflatten(1, (2, 2))))  # of two key heads
    refused(r"pre.key holds torch.bfloat16 \(1, 2, 2, 5, 40\)", (q, k, v, other_heads, post))
    refused(
        r"post.key holds .*\(1, 4, 5, 39\).*same tokens as the keys", (q, k, v, pre, stage(1, 4, 1, 39, 2, k.dtype))
    )
    refused("have 5, 7, 5, 5 channels.*one rank", (q, k, v, replace(pre, key=stage(1, 4, 1, 40, 3, k.dtype).key), post))
    gates = replace(pre, key=SideWeights.of(gate=pre.key.gate))
    refused("have 5, 1, 5, 5 channels.*the same parts", (q, k, v, gates, post))
    small = torch.ones(1, 2, 2, device=DEVICE)
    refused(r"static is torch.float32 \(1, 2, 2\).*\(1, 4, 4\)", (q, k, v, replace(pre, static=small), post))
    whole = torch.ones(1, 4, 4, dtype=torch.int64, device=DEVICE)
    refused(r"static is torch.int64 \(1, 4, 4\): expected floating point", (q, k, v, replace(pre, static=whole), post))
    refused("requires gradients.*no_grad", (q.requires_grad_(), k, v, pre, post))
    with torch.no_grad():
        run((q, k, v, pre, post))
