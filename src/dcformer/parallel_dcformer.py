"""Tensor parallelism: which modules are split over devices, and how.

Composition is split by groups of heads, like the heads themselves, and so needs no collective of its own.
"""

from typing import Any

import torch
from torch import nn
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer

_PLAN = {
    "layers.*.input_layernorm": "dcformer_replicated_for_columns",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    "layers.*.self_attn.compose": "local_params",
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
    return {name: style for name, style in _PLAN.items() if not name.endswith(absent)}


def check_tensor_parallel(config: Any, size: int) -> None:
    """Checks that a model can be split over devices by heads, with composition local to each device.

    Args:
        config: the model's `DCFormerConfig`.
        size: devices that share a layer.

    Raises:
        ValueError: when a group of heads, or the query heads of a key/value head, would be split.
    """
    composed = bool(config.compose_generators) or config.compose_static
    if composed and config.compose_groups % size:
        raise ValueError(
            f"compose_groups={config.compose_groups} is not a multiple of the tensor-parallel size {size}: heads of a "
            "group are mixed with each other, so a group must stay on one device. Use a size that divides "
            "compose_groups, or FSDP, which splits parameters and not heads. (A model trained with "
            "compose_groups=1 mixes all heads and cannot be split this way.)"
        )
    if config.num_key_value_heads % size:
        raise ValueError(
            f"num_key_value_heads={config.num_key_value_heads} is not a multiple of the tensor-parallel size {size}: "
            "a head must stay on one device. Use a size that divides it, or FSDP."
        )


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


ALL_PARALLEL_STYLES.register(
    "dcformer_replicated_for_columns",
    ReplicatedForColumns(),  # type: ignore[arg-type]  # the registry is annotated as one of functions
)

__all__ = ["ReplicatedForColumns", "check_tensor_parallel", "tensor_parallel_plan"]
