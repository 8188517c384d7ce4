"""The operators' schemas: what they import, how many arguments they take, what they say of results without kernels."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import tiny_config

from dcformer import ComposeWeights, DCFormerCompose, SideWeights, chunked_dcformer
from dcformer.kernels import layout, schemas
from dcformer.kernels.layout import Part

SCHEMAS = Path(schemas.__file__)
NAMES = {
    "dcformer::composed_attention",
    "dcformer::composed_attention_backward",
    "dcformer::composed_decode",
    "dcformer::generate_weights",
    "dcformer::generate_packed",
    "dcformer::prepare_decode",
    "dcformer::decode_step",
    "dcformer::chunked_attention",
    "dcformer::chunked_attention_backward",
}
MOST_ARGUMENTS = 10


def test_no_operator_takes_more_than_ten_arguments():
    found = {s.name: s for s in torch._C._jit_get_all_schemas() if s.name.startswith("dcformer::")}
    assert set(found) >= NAMES
    counts = {name: len(schema.arguments) for name, schema in found.items()}
    assert all(0 < count <= MOST_ARGUMENTS for count in counts.values()), counts


def test_schemas_import_torch_only():
    tree = ast.parse(SCHEMAS.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    assert found == {"collections.abc", "typing", "torch"}


# In a process of its own, with a module finder that knows no Triton.
ALONE = """
import importlib.util, sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoTriton())
import torch
spec = importlib.util.spec_from_file_location("schemas", sys.argv[1])
schemas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schemas)
assert not [name for name in sys.modules if name.partition(".")[0] in ("triton", "transformers", "dcformer")]

def new(*shape):
    return torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)

q, k, v = new(2, 4, 20, 16), new(2, 2, 30, 16), new(2, 2, 30, 8)
weights = [new(2, 4, 5, 20), new(2, 2, 2, 5, 30)]
bounds = torch.empty(2, 1, 20, device="meta", dtype=torch.int32)
for keeps, shape in ((0, (0, 0)), (1, (128, 3 * 2 * 4 * 32))):
    plan = [1, 0, 0, -1, keeps, 0, 1]
    out, lse, kept, norms = torch.ops.dcformer.composed_attention(q, k, v, weights, bounds, plan, 0.25)
    assert out.shape == (2, 20, 4, 8) and lse.shape == (2, 4, 20) and lse.dtype == torch.float32
    assert norms.shape == (2, 2, 1) and norms.dtype == torch.float32
    assert kept.shape == shape and kept.dtype == (torch.float16 if keeps else torch.float32)
out.sum().backward()
assert all(t.grad.shape == t.shape and t.grad.dtype == t.dtype for t in (q, k, v, *weights))
with torch.no_grad():
    out = torch.ops.dcformer.composed_decode(q[:, :, :1], k, v, weights[1:], None, [1, -1, 1], 0.25)
    assert out.shape == (2, 1, 4, 8)
    hidden, gates, qkw = new(2, 7, 4 * 16), new(2, 7, 4 * 4), new(4 * 16, 16)
    out = torch.ops.dcformer.generate_weights(hidden, gates, qkw, 2, 2, 4, 2, "none", torch.float32)
    assert out.shape == (4, 2, 4, 5, 7) and out.dtype == torch.float32
    out = torch.ops.dcformer.generate_packed(hidden, gates, qkw, k, v, 2, 4, 2, "none", torch.float32)
    assert out.shape == (2, 2, 4, 5, 7)
    q, k, v, cos = new(2, 3, 64), new(2, 3, 32), new(2, 3, 32), new(1, 3, 16)
    plan, keys, place = [16, 2, 2, 16, 16, 4, 2, 0, 1, 2, 5, 6], new(2, 2, 9, 32), torch.zeros((), device="meta").long()
    first = (q, k, v, [hidden, gates, qkw, cos, cos])
    one = torch.ops.dcformer.prepare_decode(*first, plan, 0.0, "none")
    assert [x.shape for x in one] == [(2, 4, 3, 16), (2, 2, 3, 32), (2, 2, 3, 32), (2, 2, 4, 5, 3)]
    plan = [4, 16, 1, 1, 1, 1, 16, 16, 4, 2, 1, 0, 0, 3, 4, 7]
    product, others = new(2, 3, 64 + 2 * 32 + 64 + 16), [qkw, cos, cos, place]
    out = torch.ops.dcformer.decode_step(product, others, keys, keys.clone(), plan, [0.0, 0.25], "none")
    assert out.shape == (2, 3, 4, 16)
try:
    torch.ops.dcformer.composed_decode(*(torch.zeros(1, 1, 1, 8) for _ in range(3)), [], None, [1, -1], 1.0)
except RuntimeError as error:
    assert "composed_decode has no kernel" in str(error), error
else:
    raise AssertionError("a kernel without Triton")
"""


def test_schemas_and_fakes_work_without_triton():
    run = subprocess.run([sys.executable, "-c", ALONE, str(SCHEMAS)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_one_flag_enumeration():
    """The kernels' constants are `Part`, one and the same for prefill and decoding."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'dcformer[kernels]'")
    from dcformer.kernels import decode
    from dcformer.kernels.triton import backward, heads, key_side

    for module in (heads, key_side, backward, decode):
        for name in {"QUERY", "KEY", "STATIC", "GATE"} & set(vars(module)):
            assert getattr(module, name).value == Part[name]
    assert {"QUERY", "KEY", "STATIC", "GATE"} <= set(vars(heads)) & set(vars(decode))


def test_operators_take_the_same_six_weights():
    """The places that chunked and the kernels' operators count by."""

    def stage(first):
        query, key = SideWeights(torch.full((1, 4, 5, 3), first)), SideWeights(torch.full((1, 4, 5, 7), first + 1))
        return ComposeWeights(query, key, torch.full((1, 4, 4), first + 2))

    pre, post = stage(0.0), stage(3.0)
    flat = chunked_dcformer.flatten_weights(pre, post)
    weights, places = layout.packed_weights(pre, post, 2)
    assert places == list(range(6)) and [w.shape[:3] for w in weights[1::3]] == [(1, 2, 2)] * 2
    assert [w.unique().item() for w in flat] == [w.unique().item() for w in weights] == places
    post.query = None
    assert layout.packed_weights(None, post, 2)[1] == [4, 5]
    assert chunked_dcformer.flatten_weights(None, post)[:4] == [None] * 4


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_kernels_get_the_memory_of_the_cache(kv_heads):
    """Grouped-query attention too: what a cache holds is not copied on its way to an operator."""
    compose = DCFormerCompose(tiny_config(num_attention_heads=4, num_key_value_heads=kv_heads))
    rows = torch.randn(2, kv_heads, 9, 8 + compose.channels["pre"])
    key, side = compose.unpack(rows, 8, "pre")
    (weights,), (place,) = layout.packed_weights(ComposeWeights(key=side), None, kv_heads)
    assert place == 1 and weights.shape == (2, kv_heads, 4 // kv_heads, 5, 9)
    assert weights.untyped_storage().data_ptr() == key.untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
    assert weights.data_ptr() == rows[..., 8:].data_ptr() and weights.stride()[3:] == (1, rows.stride(2))
    _, gathered = compose.unpack(rows, 8, "pre", gather=True)
    assert gathered.packed.is_contiguous() and torch.equal(gathered.packed, side.by_head)
