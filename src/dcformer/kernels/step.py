"""A decoding step of a layer as one operator: from the product of its projections to the output of its heads.

`prepare` and `decode` have the kernels. Between them lies the cache. Where that lends its memory, rows of new keys and
values are written and read there, and nothing else has to happen: no copy, and for the host one call, which repeats
launches that were chosen once (`repeated`).
"""

# Arguments of operators are those of their prototypes in `schemas`.
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence
from typing import Any

import torch

from ..compose_dcformer import key_weights_behind
from ..fusion_dcformer import has_no_hooks
from . import decode, prepare
from .generator import APPROXIMATE
from .limits import require_supported
from .ops import visible_keys
from .prepare import can_prepare, fits
from .repeated import Launch, Repeated, geometry
from .schemas import DEVICES, decode_step_op, is_watched, place_tensors, refuse_backward

# the operator's `others`, in the order that its plan counts them by
_OTHERS = ("qkw", "q_norm", "k_norm", "cos", "sin", "pre_static", "post_static", "place", "visible")
_AT = {name: number for number, name in enumerate(_OTHERS)}
_PARAMETERS = [_AT[name] for name in ("qkw", "q_norm", "k_norm", "pre_static", "post_static")]
_FIELDS = 12  # of the plan, before the number of rows


def launches(*given: Any) -> tuple[list[torch.Tensor], list[Launch]]:
    """The output [B, N, H, D] and what lies before it, and the launches that fill them.

    Args:
        given: the product, keys and values; the nine `others` of `decode_step_op`, None for absent ones, `visible` as
            uint8; the plan without rows and places, its numbers, S as `decode.rounded_length` has it, and GELU's
            flavor; and what parameters are like: a number, so that a layer finds it out once and not `_key_of` in each
            step, though here the tensors tell it, too. The memory is longer than one key, and may be shorter than the
            rounded S: no choice differs by it.
    """
    product, keys, values, *others, plan, (norm_eps, scale), rounded, approximate, _ = given
    qkw, query_weight, key_weight, cos, sin, *statics, place, visible = others
    heads, head_dim, *present, behind_keys, behind_values, heads_per_group, rank, has_gate, is_ring = plan
    require_supported(rank=rank, head_dim=head_dim)
    stages, sides = sum(present[:2]), sum(present[2:])
    generators, width = stages * sides, 2 * rank + has_gate

    columns = [heads * head_dim, *(keys.shape[1] * head_dim,) * 2, generators * 2 * rank * heads]
    columns.append(generators * heads * has_gate)
    parts = [part if part.shape[-1] else None for part in product.split(columns, dim=-1)]
    sizes = head_dim, stages, sides, behind_keys, behind_values, heads_per_group, rank
    (queries, weights), first = prepare.launches(
        *parts, qkw, query_weight, key_weight, cos, sin, keys, values, place, is_ring, sizes, norm_eps, approximate
    )
    for launch in first:
        launch.wholes |= dict.fromkeys(("p_q", "p_k", "p_v", "p_hidden", "p_gates"), product)

    of_queries, wholes = list(weights), []
    composed: list[torch.Tensor | None] = []
    for stage, memory, behind, static in zip(
        present[:2], (keys, values), (behind_keys, behind_values), statics, strict=True
    ):
        rows = memory[:, :, :rounded]
        query = of_queries.pop(0) if stage and present[2] else None
        key = key_weights_behind(rows, head_dim, heads // keys.shape[1], width) if behind else None
        composed += [query, key, None if static is None else static.view(-1, heads_per_group, heads_per_group)]
        wholes.append({"p_k": memory, "p_v": memory, "p_wk": memory, "p_static": static})
    composes = generators or any(static is not None for static in statics)
    groups = heads // heads_per_group if composes else keys.shape[1]
    require_supported(heads=heads // groups)
    states = (memory[:, :, :rounded, :head_dim] for memory in (keys, values))
    ring = place if is_ring else None
    made, second = decode.launches(queries, *states, *composed, visible, ring, groups, scale, None)
    for launch, whole in zip(second, wholes, strict=False):  # `scores` reads keys, `output` values
        launch.wholes |= {name: tensor for name, tensor in whole.items() if tensor is not None}
    return [*made, queries, weights], [*first, *second]


def _key_of(tensors) -> tuple:
    """What decides of the tensors that are others in each step; `launches` is told what parameters are like.

    Not how long the memory is, unless a row on the device has to be within it; nor the shape of the mask, which grows
    with it.
    """
    product, keys, values, _, _, _, cos, sin, _, _, place, visible = tensors
    capacity = None if place is None else keys.shape[2]
    seen = None if visible is None else visible.data_ptr() & 15
    return geometry([product, cos, sin, place]), _rows(keys), _rows(values), capacity, seen


def _rows(memory: torch.Tensor) -> tuple:
    batch, heads, _, channels = memory.shape
    return batch, heads, channels, memory.stride(), memory.dtype, memory.data_ptr() & 15


_RUN = Repeated(launches, _key_of, returned=1)


def _run(product, keys, values, others, row, plan, numbers, approximate, parameters) -> torch.Tensor:
    """What the operator does.

    Args:
        product, keys, values, numbers, approximate: as for the operator; numbers as a tuple.
        others: all nine, None for absent ones.
        row: rows that are filled already, where no tensor says so.
        plan: the operator's before the row, as a tuple.
        parameters: `geometry` of those among the others.
    """
    *_, place, visible = others
    count = row + product.shape[1] if place is None else keys.shape[2]
    seen = None if visible is None else visible.view(torch.uint8)
    made = _RUN(
        [product, keys, values, *others[:-1], seen],
        plan, numbers, decode.rounded_length(count), approximate, parameters,
        varying={"S": count, "row": row} | decode.visible_strides(seen),
    )  # fmt: skip
    torch.autograd.graph.increment_version([x for x in (keys, values) if not x.is_inference()])
    return made[0]


@torch.library.register_kernel(decode_step_op.name(), DEVICES)
def _decode_step(product, others, keys, values, plan, numbers, approximate):
    placed = place_tensors(others, plan[_FIELDS + 1 :], len(_OTHERS))
    parameters = geometry([placed[i] for i in _PARAMETERS])
    given = placed, plan[_FIELDS], tuple(plan[:_FIELDS]), tuple(numbers), approximate, parameters
    made = [_run(product, keys, values, *given)]
    return refuse_backward("decode_step", made, [product, *others, keys, values])[0]


class _Layer:
    """What a step takes from the modules of a layer. It is remembered as long as they have not changed.

    Args:
        attention: the layer's `DCFormerAttention`, of which `can_prepare` says that the kernel may replace its modules.
        product: of its projections.
    """

    def __init__(self, attention: Any, product: torch.Tensor):
        modules = vars(attention)["_modules"]
        self.of_product = product.dtype, product.device
        self.compose, self.query_norm, self.key_norm = (modules[name] for name in ("compose", "q_norm", "k_norm"))
        self.act_fn, self.eps = self.compose.act_fn, getattr(self.query_norm, "eps", 0.0)
        of_compose = vars(self.compose)["_parameters"]
        held = {name: (of_compose, name) for name in ("qkw", "pre_static", "post_static")}
        held |= {name: (vars(modules[name])["_parameters"], "weight") for name in ("q_norm", "k_norm")}
        self.parameters = [(of, name, of.get(name)) for of, name in held.values()]
        self.given = [tensor for *_, tensor in self.parameters if tensor is not None]
        self.places: list[tuple[int, torch.dtype]] = []
        self.form: tuple = ()
        own = [tensor for *_, tensor in self.parameters]
        self.others = place_tensors(own, [_AT[name] for name in held], len(_OTHERS))  # without those of a step

        compose, dim = self.compose, attention.head_dim
        heads, self.kv_heads = (size // dim for size in attention.fused.sizes[:2])
        self.widths = [dim + compose.channels[stage] for stage in ("pre", "post")]
        names = {name for generator in compose.generators for name in generator}  # of stages and sides that have one
        present = (int(name in names) for name in ("pre", "post", "query", "key"))
        plan = [heads, dim, *present, *(width - dim for width in self.widths)]
        self.plan = *plan, compose.heads_per_group, compose.rank, int(compose.gate_proj is not None)
        self.approximate = APPROXIMATE.get(type(self.act_fn), "none")

    def is_current(self, attention: Any, product: torch.Tensor) -> bool:
        """Whether all is as it was found: modules, hooks, eps, and parameters, contiguous at their addresses.

        The projections are not looked at: `FusedProjections.is_intact` knows about these.
        """
        modules, compose = vars(attention)["_modules"], self.compose
        query_norm, key_norm = self.query_norm, self.key_norm
        if (
            modules["compose"] is not compose
            or modules["q_norm"] is not query_norm
            or modules["k_norm"] is not key_norm
        ):
            return False
        act_fn = vars(compose)["_modules"]["act_fn"]
        if act_fn is not self.act_fn or (product.dtype, product.device) != self.of_product:
            return False
        if not (has_no_hooks(act_fn) and has_no_hooks(compose) and has_no_hooks(query_norm) and has_no_hooks(key_norm)):
            return False
        if getattr(query_norm, "eps", 0.0) != self.eps or getattr(key_norm, "eps", 0.0) != self.eps:
            return False
        for of, name, tensor in self.parameters:
            if of.get(name) is not tensor:
                return False
        return self.places == _places(self.given)

    def remember(self) -> "_Layer":
        """Where parameters are and what they are like, which `is_current` and remembered launches go by."""
        self.places = _places(self.given)
        self.form = geometry([self.others[i] for i in _PARAMETERS])
        return self


def _places(tensors: Sequence[torch.Tensor]) -> list[tuple[int, torch.dtype]]:
    return [(tensor.data_ptr() if tensor.is_contiguous() else 0, tensor.dtype) for tensor in tensors]


def _layer(attention: Any, hidden_states: torch.Tensor, product: torch.Tensor) -> _Layer | None:
    """The layer as it is now; None where the kernel may not take the place of its modules."""
    if torch.compiler.is_compiling():  # what is remembered would be a guard of the graph
        return _Layer(attention, product) if can_prepare(attention, hidden_states, product) else None
    known = attention.fused.remembered
    if known is None or not known.is_current(attention, product):
        known = _Layer(attention, product).remember() if can_prepare(attention, hidden_states, product) else None
        attention.fused.remembered = known
    return known


def decode_step(
    attention: Any,
    hidden_states: torch.Tensor,
    product: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    lend: Any,
    attention_mask: Any = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
) -> tuple[torch.Tensor, Any] | None:
    """All that a layer with a cache does between its fused product and the projection of its output.

    Args:
        attention: the layer's `DCFormerAttention`.
        hidden_states: [B, N, E].
        product: [B, N, columns], of `attention.fused`.
        position_embeddings: cosines and sines, each [B or 1, N, P].
        lend: (shapes [B, Hkv, N, channels] of new keys and values, a tensor like them) -> the `Room` that a cache has
            for them, or None.
        attention_mask, sliding_window, is_causal: as for `triton_attention`.

    Returns:
        output [B, N, H, D], and the room, whose rows are filled and not counted yet; or None, with nothing done, where
        `prepare` would give None, and where the cache lends nothing.

    Raises:
        ValueError: as `triton_attention`.
    """
    cos, sin = position_embeddings
    batch, length, _ = product.shape
    if not batch or not length or not fits(hidden_states, product, cos):
        return None
    if (layer := _layer(attention, hidden_states, product)) is None:
        return None
    keys, values = layer.widths
    shapes = [(batch, layer.kv_heads, length, keys), (batch, layer.kv_heads, length, values)]
    if (room := lend(shapes, product)) is None:
        return None
    count = room.row + length if room.place is None else room.keys.shape[2]
    options = (attention_mask, sliding_window, is_causal)
    visible = visible_keys(attention, *options, (batch, length, count), product.device)
    if cos.stride(-1) != 1 or sin.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    others = layer.others.copy()
    others[_AT["cos"]], others[_AT["sin"]], others[_AT["place"]], others[_AT["visible"]] = cos, sin, room.place, visible
    numbers = layer.eps, attention.scaling
    # torch's way to an operator's kernel takes the host as long as a launch
    if not is_watched(product, room.keys, room.values, cos, sin, room.place, visible):
        given = others, room.row, (*layer.plan, int(room.is_ring)), numbers, layer.approximate, layer.form
        return _run(product, room.keys, room.values, *given), room
    present = [(place, tensor) for place, tensor in enumerate(others) if tensor is not None]
    plan = [*layer.plan, int(room.is_ring), room.row, *(place for place, _ in present)]
    tensors = product, [tensor for _, tensor in present], room.keys, room.values
    return decode_step_op(*tensors, plan, numbers, layer.approximate), room


__all__ = ["decode_step"]
