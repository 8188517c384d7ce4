"""Tensor parallelism: which modules are split over devices, and how.

Composition is split by groups of heads, like the heads themselves, and so needs no collective of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ReplicatedWithGradAllReduce,
    TensorParallelLayer,
)

from .heads_dcformer import MAP_FIELDS

# With head embeddings: the seeds of queries, keys and values are whole on every device, each head's embeddings are not.
_EMBEDDINGS_PLAN = {
    "layers.*.self_attn": "dcformer_local_parameters",
    "layers.*.self_attn.q_proj": "dcformer_seed",
    "layers.*.self_attn.k_proj": "dcformer_seed",
    "layers.*.self_attn.v_proj": "dcformer_seed",
    "layers.*.self_attn.q_embedding": "colwise",
    "layers.*.self_attn.k_embedding": "colwise",
    "layers.*.self_attn.v_embedding": "colwise",
}
_MAPS_PLAN = {
    "layers.*.self_attn.key_heads": "dcformer_head_map",
    "layers.*.self_attn.value_heads": "dcformer_head_map",
}
_PLAN = {
    "layers.*.input_layernorm": "dcformer_replicated_for_columns",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.compose": "dcformer_local_parameters",
    "layers.*.self_attn.compose.dw1_proj": "colwise",
    "layers.*.self_attn.compose.gate_proj": "colwise",
    "layers.*.self_attn.compose.qkw": "colwise",
    "layers.*.self_attn.compose.pre_static": "colwise",
    "layers.*.self_attn.compose.post_static": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.post_attention_layernorm": "dcformer_replicated_for_columns",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}


def tensor_parallel_plan(config: Any) -> dict[str, str]:
    """Module or parameter of the decoder -> style of tensor parallelism, for those that the model has.

    Args:
        config: the model's `DCFormerConfig`.
    """
    dynamic = bool(config.compose_generators)
    present = {
        "self_attn.q_norm": config.qk_norm,
        "self_attn.k_norm": config.qk_norm,
        "compose": dynamic or config.compose_static,
        "compose.dw1_proj": dynamic and config.compose_projection,
        "compose.qkw": dynamic and config.compose_projection,
        "compose.gate_proj": dynamic and config.compose_gate,
        "compose.pre_static": config.compose_static and config.compose_pre,
        "compose.post_static": config.compose_static and config.compose_post,
        # multi-gate MLPs stay whole: their softmax runs over the gates of all slices of the activation
        "post_attention_layernorm": not config.mlp_gates,
        "mlp.gate_proj": config.mlp_type == "gated" and not config.mlp_gates,
        "mlp.up_proj": not config.mlp_gates,
        "mlp.down_proj": not config.mlp_gates,
    }
    absent = tuple("." + name for name, is_present in present.items() if not is_present)
    plan = dict(_PLAN)
    if config.head_embeddings is not None:
        plan |= _EMBEDDINGS_PLAN
    if any(getattr(config, field) is not None for field in MAP_FIELDS):
        plan |= _MAPS_PLAN
    return {name: style for name, style in plan.items() if not name.endswith(absent)}


def check_tensor_parallel(config: Any, size: int) -> None:
    """Checks that a model can be split over devices by heads, with composition local to each device.

    Args:
        config: the model's `DCFormerConfig`.
        size: devices that share a layer.

    Raises:
        ValueError: when a group of heads, or the query heads of a key or value head, would be split.
    """
    composed = config.composes
    if composed and config.compose_groups % size:
        raise ValueError(
            f"compose_groups={config.compose_groups} is not a multiple of the tensor-parallel size {size}: heads of a "
            "group are mixed with each other, so a group must stay on one device. Use a size that divides "
            "compose_groups, or FSDP, which splits parameters and not heads. (A model trained with "
            "compose_groups=1 mixes all heads and cannot be split this way.)"
        )
    if config.head_embeddings is not None:
        if config.num_attention_heads % size:
            raise ValueError(
                f"num_attention_heads={config.num_attention_heads} is not a multiple of the tensor-parallel size "
                f"{size}: a head must stay on one device. Use a size that divides it, or FSDP."
            )
        return
    for field in MAP_FIELDS:
        for layer, row in enumerate(getattr(config, field) or ()):
            if any(_block(row, rank, size) is None for rank in range(size)):
                raise ValueError(
                    f"{field}[{layer}] cannot be cut for the tensor-parallel size {size}: query heads of one device "
                    "read heads of another. Search with head_blocks of that size, use another size, or FSDP."
                )
    if config.num_key_value_heads % size:
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads} is not a multiple of the tensor-parallel size {size}: "
            "a head must stay on one device. Use a size that divides it, or FSDP."
        )


def _block(row: Sequence[int], rank: int, size: int) -> list[int] | None:
    """A device's part of a row of a head map, numbered from 0; None where it reads other devices' heads."""
    queries, heads = len(row), max(row) + 1
    if queries % size or heads % size:
        return None
    first = rank * heads // size
    part = [head - first for head in row[rank * queries // size : (rank + 1) * queries // size]]
    return part if all(0 <= head < heads // size for head in part) else None


class LocalParameters(TensorParallelLayer):
    """The style of a module that computes with what each device has of its own parameters, as plain tensors.

    What is split is said of each parameter. The library has the same since Transformers 5.23, as "local_params".
    """

    def should_use_local_tensors(self, module: nn.Module) -> bool:
        """Always."""
        return True


class SplitHeadMap(TensorParallelLayer):
    """The style of a `HeadMap`: each device keeps its block of the query heads, and the heads that these read."""

    def install_forward(self, module: Any, mesh: Any) -> nn.Module:
        """Cuts the map; it has no forward."""
        part = _block(module.heads, _rank(mesh), mesh.size() if mesh.ndim == 1 else mesh["tp"].size())
        assert part is not None, "check_tensor_parallel lets no such map through"
        module.take(part)
        return module


class Seed(ReplicatedWithGradAllReduce):
    """The style of a linear layer that every device has whole, and whose output feeds its own heads only.

    Gradients of its parameters and of its input are then sums over the devices.
    """

    def install_forward(self, module: nn.Module, mesh: Any) -> nn.Module:
        """Takes inputs of column-wise layers, which the layers beside it are."""
        module = super().install_forward(module, mesh)
        forward = module.forward

        def seed_forward(hidden_states: torch.Tensor) -> torch.Tensor:
            from torch.distributed.tensor import DTensor, Partial  # not in every build of PyTorch

            if isinstance(hidden_states, DTensor):
                hidden_states = hidden_states.to_local(grad_placements=[Partial()])
            return forward(hidden_states)

        module.forward = seed_forward  # type: ignore[method-assign]  # as the library's styles do
        return module


def _rank(mesh: Any) -> int:
    return mesh.get_local_rank() if mesh.ndim == 1 else mesh.get_local_rank("tp")


class ReplicatedForColumns(TensorParallelLayer):
    """The style of a module whose output goes only to column-wise layers.

    Every such layer contributes to the output's gradient on each device. With a plain tensor each layer sums its
    contribution over the devices; with this style contributions are added on each device first and summed over the
    devices once.
    """

    def transform_output_post_forward(self, module: nn.Module, output: torch.Tensor, mesh: Any) -> torch.Tensor:
        """[B, T, E] -> the same, replicated; unchanged when gradients are off."""
        if not torch.is_grad_enabled():
            return output
        from torch.distributed.tensor import DTensor, Replicate  # not in every build of PyTorch

        return DTensor.from_local(output, mesh, [Replicate()], run_check=False)


_STYLES = {
    "dcformer_local_parameters": LocalParameters(),
    "dcformer_replicated_for_columns": ReplicatedForColumns(),
    "dcformer_head_map": SplitHeadMap(),
    "dcformer_seed": Seed(),
}
for _name, _style in _STYLES.items():
    ALL_PARALLEL_STYLES.register(_name, _style)  # type: ignore[arg-type]  # annotated as a registry of functions

__all__ = [
    "LocalParameters",
    "ReplicatedForColumns",
    "Seed",
    "SplitHeadMap",
    "check_tensor_parallel",
    "tensor_parallel_plan",
]
