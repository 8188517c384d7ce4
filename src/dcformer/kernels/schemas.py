"""The kernels' operators as PyTorch knows them: names, arguments, shapes of results, who has gradients.

Imports torch and nothing else, so a graph can be traced where there is no Triton. What computes them is registered by
the modules that launch kernels: `ops`, `decode`, `generator`, `prepare` and `step`.

All take composition weights in one form: `weights`, the present ones of six tensors, and at the end of the integers
`plan` their places among the six. First come those of the stage before the softmax, then those of the one after it:
    0, 3    query side, [B, H, channels, T], contiguous
    1, 4    key side, [B, Hkv, H / Hkv, channels, S], of any strides: it may lie behind cached keys and values
    2, 5    static projection, [G, M, M], contiguous
A head's channels are R `down`, R `up` and one gate, in this order, as far as present; their number tells which.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

DEVICES = ("cpu", "cuda")  # that have kernels: the interpreter's and the compiler's
UNBOUNDED = 2**30  # of `problem.Visibility`: more than any number of keys
KEPT_MAPS = 3  # for the backward pass, of every chunk of queries: S, P, W
ROWS = 64  # queries, keys or values whose copies share a power of two: see `triton.scales`
_ANY_TILE = 128  # queries: a multiple of every tile


def _kernel(name: str) -> RuntimeError:
    return RuntimeError(f"dcformer::{name} has no kernel for this device, or dcformer.kernels is not in use.")


def _inference_op(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """Makes a function an operator without gradients, for devices for which nothing else is registered.

    `torch.library.custom_op` puts Python for gradients and aliases between a call and its kernel, which takes the host
    as long as the kernel's launches; a decoding step has two such calls in each layer. So kernels themselves call
    `refuse_backward`, and tell torch of what they write in place. A graph that is compiled for a backward pass through
    such an operator has no gradients for its inputs, without an error.
    """

    def define(prototype: Callable) -> Any:
        schema = torch.library.infer_schema(prototype, mutates_args=mutates_args)
        torch.library.define(f"dcformer::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_kernel(f"dcformer::{name}", None, prototype)
        return getattr(torch.ops.dcformer, name).default

    return define


def is_watched(*tensors: torch.Tensor | None) -> bool:
    """Whether torch has to know that an operator is called, and not only its kernels.

    So it is where a graph is made, in a mode of `__torch_dispatch__` (fake tensors, counters), and for subclasses of
    tensors. Elsewhere an operator without gradients may be left out, where none are recorded: modes of
    `__torch_function__` and the profiler then see its kernels and not its name.

    Args:
        tensors: the operator's, but for parameters; None for absent ones.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch._C._len_torch_dispatch_stack() > 0:
        return True
    return any(tensor is not None and type(tensor) is not torch.Tensor for tensor in tensors)


def place_tensors(
    tensors: Sequence[torch.Tensor | None], places: Sequence[int], count: int
) -> list[torch.Tensor | None]:
    """So many tensors, the present ones at their places, None at the others."""
    found: list[torch.Tensor | None] = [None] * count
    for place, tensor in zip(places, tensors, strict=True):
        found[place] = tensor
    return found


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.name = name
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        raise RuntimeError(
            f"dcformer::{ctx.name} has no backward pass: compute under torch.no_grad(), or use "
            "attn_implementation='dcformer_chunked'."
        )


def refuse_backward(
    name: str, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """What an operator without gradients returns: its results, through which a backward pass is an error.

    Args:
        name: of the operator.
        results: not views of the inputs.
        inputs: those that may require gradients.
    """
    if torch.is_grad_enabled():
        needing = [x for x in inputs if x is not None and x.requires_grad]
        if needing:
            return [_NoBackward.apply(name, result, *needing) for result in results]
    return list(results)


# --- attention --------------------------------------------------------------------------------------------------------


def kept_queries(low: int, high: int) -> int:
    """The most queries of a chunk whose maps are kept: any number, or with a window some four to eight of these.

    Args:
        low, high: of `problem.Visibility`.
    """
    if low <= -UNBOUNDED or high >= UNBOUNDED:
        return UNBOUNDED
    queries = _ANY_TILE
    while queries < 4 * (high - low):
        queries *= 2
    return queries


def new_kept(query: torch.Tensor, key: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Memory for the maps that are kept: [T, up to whole tiles, numbers of a query], float16 or float32.

    How much it is follows from shapes alone. A query has room for S, P and W of all heads of all sequences, of as many
    keys as its chunk may have.

    Args:
        query, key: [B, H, T, D], [B, Hkv, S, D].
        low, high: of `problem.Visibility`.
    """
    batch, heads, length, _ = query.shape
    keys = -(-key.shape[2] // 16) * 16
    queries = kept_queries(low, high)
    if queries < UNBOUNDED:  # those of a chunk begin at a multiple of `ROWS` and end at one of 16
        keys = torch.sym_min(keys, -(-(queries + high - low) // 16) * 16 + ROWS)
    shape = (-(-length // _ANY_TILE) * _ANY_TILE, KEPT_MAPS * batch * heads * keys)
    return query.new_empty(shape, dtype=torch.float32 if query.dtype == torch.float32 else torch.float16)


def new_norms(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Memory for what the forward pass finds of values where it copies them, which the backward pass needs: float32
    [B, Hkv, blocks of keys], without blocks where it never does.

    Args:
        query, key: [B, H, T, D], [B, Hkv, S, D].
    """
    batch, heads, length, _ = key.shape
    blocks = torch.sym_max(1, -(-length // ROWS)) if query.dtype == torch.bfloat16 else 0
    return query.new_empty((batch, heads, blocks), dtype=torch.float32)


@torch.library.custom_op("dcformer::composed_attention", mutates_args=())
def attention_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bounds: torch.Tensor,
    plan: Sequence[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Composed attention of many queries.

    Args:
        query, key, value: [B, H, T, D], [B, Hkv, S, D] and [B, Hkv, S, DV]; the last dimension contiguous.
        weights: see above.
        bounds: the first key that each query sees, and the one after the last, int32 [2, B or 1, T].
        plan: G; low and high of `problem.Visibility`; chunk_bytes, -1 for None; 1 to keep maps, or 0; places of the
            weights.
        scale: factor of the scores.

    Returns:
        output [B, T, H, DV], and log-sum-exp in base 2 [B, H, T]. Both are differentiable in the first four arguments.
        Then what is kept for the backward pass: maps, `new_kept`, which is empty where none are, and `new_norms`.
    """
    raise _kernel("composed_attention")


@attention_op.register_fake
def _(query, key, value, weights, bounds, plan, scale):
    batch, heads, length, _ = query.shape
    out = query.new_empty((batch, length, heads, value.shape[3]))
    lse = query.new_empty((batch, heads, length), dtype=torch.float32)
    _, low, high, _, keeps, *_ = plan
    kept = new_kept(query, key, low, high) if keeps else lse.new_empty(0, 0)
    return out, lse, kept, new_norms(query, key)


@torch.library.custom_op("dcformer::composed_attention_backward", mutates_args=())
def attention_backward_op(
    grad_out: torch.Tensor,
    saved: Sequence[torch.Tensor],
    grad_lse: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bounds: torch.Tensor,
    plan: Sequence[int],
    scale: float,
) -> list[torch.Tensor]:
    """Gradients of query, key, value and each of the weights, in their dtypes.

    Args:
        grad_out: of the output, [B, H, T, DV].
        saved: what `attention_op` returned behind the output.
        grad_lse: of the log-sum-exp, [B, H, T]; None where nothing depends on it.
        Others: those of `attention_op`.
    """
    raise _kernel("composed_attention_backward")


@attention_backward_op.register_fake
def _(grad_out, saved, grad_lse, query, key, value, weights, *args):
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value, *weights)]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    query, key, value, weights, bounds, *ctx.numbers = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output[1:], query, key, value, bounds, *weights)


def _has_none(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"the fused kernels have no {what}: use attn_implementation='eager', or call "
        "model.set_attn_implementation('eager')."
    )


def _refuse_batched(*grads: torch.Tensor | None) -> None:
    """Refuses a backward pass of many gradients at once, in words that torch's own error lacks."""
    if any(grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads):
        raise _has_none("batched gradients (is_grads_batched, vectorize)")


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None, *_: None) -> tuple:
    _refuse_batched(grad_out, grad_lse)
    lse, kept, norms, query, key, value, bounds, *weights = ctx.saved_tensors
    if grad_out is None:
        batch, heads, length, _ = query.shape
        grad_out = query.new_zeros((batch, length, heads, value.shape[3]))
    if grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    grad_out = grad_out.transpose(1, 2)  # [B, H, T, DV]
    saved = [lse, kept, norms]
    grads = attention_backward_op(grad_out, saved, grad_lse, query, key, value, weights, bounds, *ctx.numbers)
    return (*grads[:3], grads[3:], None, None, None)


attention_op.register_autograd(_differentiate, setup_context=_save)


def _refuse_second_derivative(ctx: Any, grads: list[torch.Tensor]) -> None:
    raise _has_none("second derivatives")


attention_backward_op.register_autograd(_refuse_second_derivative)


@_inference_op("composed_decode")
def decode_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    weights: Sequence[torch.Tensor],
    visible: torch.Tensor | None,
    plan: Sequence[int],
    scale: float,
) -> torch.Tensor:
    """Composed attention of a few queries. Has no gradients.

    Args:
        query, key, value, weights, scale: as for `attention_op`.
        visible: bool [B or 1, 1, T, S], which keys each query sees; None for all.
        plan: G; the most splits of the keys to make, -1 for a choice; places of the weights.

    Returns:
        [B, T, H, DV].
    """
    raise _kernel("composed_decode")


@torch.library.register_fake(decode_op.name())
def _(query, key, value, *args):
    return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))


# --- weight generators ------------------------------------------------------------------------------------------------


def generated_shape(
    hidden: torch.Tensor | None, gates: torch.Tensor | None, generators: int, rank: int
) -> tuple[int, int, int, int, int]:
    """[C, B, H, channels, N] from the pre-activations: H is that of the rank under tensor parallelism."""
    if hidden is not None:
        batch, length, columns = hidden.shape
        columns = columns // (2 * rank)
    else:
        assert gates is not None
        batch, length, columns = gates.shape
    return generators, batch, columns // generators, 2 * rank + (gates is not None), length


@torch.library.custom_op("dcformer::generate_weights", mutates_args=())
def generate_weights_op(
    hidden: torch.Tensor | None,
    gates: torch.Tensor | None,
    qkw: torch.Tensor | None,
    stages: int,
    sides: int,
    heads_per_group: int,
    rank: int,
    approximate: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """From the pre-activations of the first layer to the weights of all generators.

    Args:
        hidden: [B, N, G·C·K], or None without low-rank projections.
        gates: [B, N, G·C·M], or None without gates.
        qkw: [G·C·K, K] in the dtype of `hidden`, or None as that is.
        stages, sides: how many there are; C is their product.
        heads_per_group: M.
        rank: R, 0 without low-rank projections.
        approximate: GELU's flavor as torch names it, "none" (erf) or "tanh".
        dtype: that of the result.

    Returns:
        [C, B, H, channels, N], contiguous, generators by stage and then side. Differentiable in the three tensors.
    """
    raise _kernel("generate_weights")


@generate_weights_op.register_fake
def _(hidden, gates, qkw, stages, sides, heads_per_group, rank, approximate, dtype):
    source = hidden if hidden is not None else gates
    return torch.empty(generated_shape(hidden, gates, stages * sides, rank), dtype=dtype, device=source.device)


@torch.library.custom_op("dcformer::generate_weights_backward", mutates_args=())
def generate_weights_backward_op(
    grad: torch.Tensor,
    hidden: torch.Tensor | None,
    gates: torch.Tensor | None,
    qkw: torch.Tensor | None,
    heads_per_group: int,
    rank: int,
    approximate: str,
) -> list[torch.Tensor]:
    """Gradients of hidden, gates and qkw, as far as present, in their dtypes.

    Args:
        grad: of the result of `generate_weights_op`.
        Others: those of `generate_weights_op`.
    """
    raise _kernel("generate_weights_backward")


@generate_weights_backward_op.register_fake
def _(grad, hidden, gates, qkw, *args):
    present = [t for t in (hidden, gates, qkw) if t is not None]
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in present]


def _save_generators(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    hidden, gates, qkw, _, _, *ctx.arguments, _ = inputs
    ctx.save_for_backward(hidden, gates, qkw)


def _differentiate_generators(ctx: Any, grad: torch.Tensor) -> tuple:
    _refuse_batched(grad)
    given = ctx.saved_tensors  # checkpoints let them be read once
    found = iter(generate_weights_backward_op(grad, *given, *ctx.arguments))
    return *[None if tensor is None else next(found) for tensor in given], *[None] * 6


generate_weights_op.register_autograd(_differentiate_generators, setup_context=_save_generators)
generate_weights_backward_op.register_autograd(_refuse_second_derivative)


@_inference_op("generate_packed", mutates_args=("rows_0", "rows_1"))
def generate_packed_op(
    hidden: torch.Tensor | None,
    gates: torch.Tensor | None,
    qkw: torch.Tensor | None,
    rows_0: torch.Tensor,
    rows_1: torch.Tensor | None,
    sides: int,
    heads_per_group: int,
    rank: int,
    approximate: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `generate_weights_op`, but the key side goes to the channels behind keys and values. Has no gradients.

    Args:
        rows_0, rows_1: filled: [B, Hkv, N, channels of a cache] of the first and the second stage present;
            H / Hkv times a head's channels, up to the multiple of 8.
        Others: those of `generate_weights_op`.

    Returns:
        [stages, B, H, channels, N], the query side's weights; empty if there is no query side.
    """
    raise _kernel("generate_packed")


@torch.library.register_fake(generate_packed_op.name())
def _(hidden, gates, qkw, rows_0, rows_1, sides, heads_per_group, rank, approximate, dtype):
    stages = 1 + (rows_1 is not None)
    _, *shape = generated_shape(hidden, gates, stages * sides, rank)
    return torch.empty((stages * (sides - 1), *shape), dtype=dtype, device=rows_0.device)


# --- between the projections of a decoding step and its attention -----------------------------------------------------


def prepared_shapes(
    query: torch.Tensor, key: torch.Tensor, has_gates: bool, plan: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of what `prepare_op` returns; the first seven integers of its plan."""
    head_dim, stages, sides, behind_keys, behind_values, _, rank = plan[:7]
    batch, length, columns = query.shape
    heads, key_heads = columns // head_dim, key.shape[2] // head_dim
    rows = [(batch, key_heads, length, head_dim + count) for count in (behind_keys, behind_values)]
    stored = stages * (sides - bool(behind_keys or behind_values))  # of the generators
    weights = (stored, batch, heads, 2 * rank + has_gates, length)
    return (batch, heads, length, head_dim), rows[0], rows[1], weights


@_inference_op("prepare_decode")
def prepare_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    others: Sequence[torch.Tensor],
    plan: Sequence[int],
    norm_eps: float,
    approximate: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """From the parts of one product to what attention and cache take. Has no gradients.

    Args:
        query, key, value: [B, N, H·D], [B, N, Hkv·D] twice, parts of one tensor; N at most 16.
        others: of seven tensors those that exist: hidden, gates and qkw of `generate_weights_op`; the weights [D] of
            the queries' and the keys' norm; cosines and sines [B or 1, N, P]. All of one dtype.
        plan: D; numbers of stages and of sides with generators; channels behind keys and behind values, 0 where nothing
            is; M; R; places of `others` among the seven.
        norm_eps: of the norms.
        approximate: as for `generate_weights_op`.

    Returns:
        queries [B, H, N, D], rows of keys and of values [B, Hkv, N, D + channels], and weights [generators, B, H, W,
        N], of the query side only where the key side went to the rows.
    """
    raise _kernel("prepare_decode")


@torch.library.register_fake(prepare_op.name())
def _(query, key, value, others, plan, norm_eps, approximate):
    return tuple(query.new_empty(shape) for shape in prepared_shapes(query, key, 1 in plan[7:], plan))


# --- all of that and attention ----------------------------------------------------------------------------------------


@_inference_op("decode_step", mutates_args=("keys", "values"))
def decode_step_op(
    product: torch.Tensor,
    others: Sequence[torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: Sequence[int],
    numbers: Sequence[float],
    approximate: str,
) -> torch.Tensor:
    """From the product of a layer's projections to the output of its heads, by way of a cache. Has no gradients.

    Args:
        product: [B, N, columns]: queries H·D, keys and values Hkv·D each, and the first layer of generators, as for
            `generate_weights_op`: hidden G·C·K and gates G·C·M, as far as present. N at most 16.
        others: of nine tensors those that exist: qkw; the weights [D] of the queries' and the keys' norm; cosines and
            sines [B or 1, N, P]; static projections [H, M] before and after the softmax; the first of the rows to
            fill, an integer on the device; and which keys each query sees, bool [B or 1, 1, N, S]. All but the last two
            of one dtype.
        keys, values: memory of the cache, [B, Hkv, capacity, D + channels]; the last dimension contiguous. N rows are
            filled. With a row on the device S is all of the capacity; where rows would end behind it the last N are
            filled, and the result is NaN: the host does not know.
        plan: H; D; which of pre, post, query and key have generators, 0 or 1 each; channels behind keys and behind
            values; M; R; whether there are gates; 1 where rows are a ring of the last tokens, N is 1 and the row is
            taken modulo the capacity (keys in `visible` are in the order of tokens), or 0; rows that are filled
            already, where no tensor says so; places of `others` among the nine.
        numbers: eps of the norms; factor of the scores.
        approximate: as for `generate_weights_op`.

    Returns:
        [B, N, H, D].
    """
    raise _kernel("decode_step")


@torch.library.register_fake(decode_step_op.name())
def _(product, others, keys, values, plan, numbers, approximate):
    return product.new_empty((product.shape[0], product.shape[1], plan[0], plan[1]))


__all__ = [
    "DEVICES",
    "KEPT_MAPS",
    "ROWS",
    "UNBOUNDED",
    "attention_backward_op",
    "attention_op",
    "decode_op",
    "decode_step_op",
    "generate_packed_op",
    "generate_weights_backward_op",
    "generate_weights_op",
    "generated_shape",
    "is_watched",
    "kept_queries",
    "new_kept",
    "new_norms",
    "place_tensors",
    "prepare_op",
    "prepared_shapes",
    "refuse_backward",
]
