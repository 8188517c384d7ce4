"""What all models with a head system have in common."""

import copy
from typing import Any

import torch
from torch import nn

from ..implementations_dcformer import FUSED_ATTENTION
from ..modeling_dcformer import DCFormerDecoderLayer, DCFormerPreTrainedModel
from .attention_head_systems import HeadSystemsAttention
from .base import HeadSystem
from .collaborative_mixing import Mixing
from .configuration_head_systems import HeadSystemsConfig
from .registry import make_system, system_class
from .stored_system import check_same_system


class HeadSystemsDecoderLayer(DCFormerDecoderLayer):
    """A layer with a head system."""

    attention_class = HeadSystemsAttention


class HeadSystemsMixin:
    """What models of text and of images have in common: initial values, and the checkpoints that they refuse."""

    config_class: Any

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, HeadSystem | Mixing):
            module.init_weights()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As `PreTrainedModel.from_pretrained`.

        Raises:
            ValueError: on a checkpoint of another head system than a given configuration's, or of none.
        """
        check_same_system(cls.config_class, pretrained_model_name_or_path, kwargs)
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]


class HeadSystemsPreTrainedModel(HeadSystemsMixin, DCFormerPreTrainedModel):
    """What all models of text with a head system have in common."""

    config: HeadSystemsConfig
    _no_split_modules = ["HeadSystemsDecoderLayer"]
    _can_record_outputs = {"hidden_states": HeadSystemsDecoderLayer, "attentions": HeadSystemsAttention}
    takes_library_attention = False  # for plain attention's shapes

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As for DCFormer, with the widths that the system gives queries, keys and values."""
        name: str = super().get_correct_attn_implementation(requested_attention, is_init_check)
        if name in FUSED_ATTENTION:
            widths = [w for i in range(self.config.num_hidden_layers) for w in make_system(self.config, i).map_widths]
            wide = copy.copy(self.config)
            wide.head_dim = max(widths, default=self.config.head_dim)
            if (reason := FUSED_ATTENTION[name].unsupported_reason(wide)) is not None:
                raise ValueError(f"attn_implementation={name!r} cannot run this model: {reason}.")
        return name

    def fuse_projections(self) -> None:
        """Refused: the projections are the head system's.

        Raises:
            ValueError: always.
        """
        raise ValueError("fuse_projections fuses the projections of plain attention; a head system has its own.")

    @classmethod
    def maybe_distribute_model(cls, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        """As for DCFormer, for systems whose parameters can be divided by heads.

        Raises:
            ValueError: for the others.
        """
        name = model.config.head_system
        is_split = mesh_manager is not None and distributed_config.tp_size > 1 and distributed_config.tp_plan != {}
        if is_split and not system_class(name).splits_by_heads:
            raise ValueError(
                f"head_system={name!r} has no tensor parallelism: its heads share channels, or a choice among all of "
                "them, so that they cannot be divided over devices. Use FSDP, which splits parameters."
            )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)


__all__ = ["HeadSystemsDecoderLayer", "HeadSystemsPreTrainedModel"]
