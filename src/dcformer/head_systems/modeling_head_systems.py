"""DCFormer models whose attention layers hold a `HeadSystem`. Everything but the attention module is inherited.

Letters: B batch, T queries.
"""

from functools import wraps
from typing import Any

import torch
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import can_return_tuple

from ..arguments_dcformer import share_of_labels
from ..modeling_dcformer import DCFormerForCausalLM, DCFormerModel, HeadOfDecoder
from .configuration_head_systems import HeadSystemsConfig
from .head_pruning import HeadPruning
from .outputs_head_systems import (
    HeadSystemsCausalLMOutput,
    HeadSystemsModelOutput,
    HeadSystemsSequenceClassifierOutput,
    extras,
    finished,
)
from .pretrained_head_systems import HeadSystemsDecoderLayer, HeadSystemsPreTrainedModel


class HeadSystemsModel(HeadSystemsPreTrainedModel, DCFormerModel):
    """The decoder, with a head system in every layer."""

    layer_class = HeadSystemsDecoderLayer

    def __init__(self, config: HeadSystemsConfig):
        super().__init__(config)
        self._extras: dict[str, Any] = {}  # of the last forward pass, for the heads

    def __getstate__(self) -> dict[str, Any]:
        """Without what is of the last forward pass."""
        return super().__getstate__() | {"_extras": {}}

    def take_loss(self) -> torch.Tensor | None:
        """The systems' loss of the last forward pass times its coefficient, for trainers that go past the model's head.

        Returns:
            None where there is none, or the head has had it.
        """
        loss, layers = self._extras.pop("aux_loss", None), self.layers
        return None if loss is None else layers[0].self_attn.system.aux_loss_coef * loss  # type: ignore[union-attr]

    def _check_head_maps(self) -> None:
        """As the decoder's, and refuses layers with other heads than the configuration's `kept_heads` has there."""
        super()._check_head_maps()
        rows = self.config.head_system_options.get("kept_heads")
        layers: Any = self.layers[: max(self.config.num_hidden_layers, 0)]
        for index, layer in enumerate(layers):
            system = layer.self_attn.system
            if not isinstance(system, HeadPruning):
                return
            if rows is None:
                expected = list(range(system.sizes.num_heads))
            else:
                expected = rows[index] if index < len(rows) else None
            if system.kept != expected:
                raise ValueError(
                    f"layer {index} has the heads {system.kept}, kept_heads of the configuration asks for {expected}: "
                    'when layers change places, so must the lists of head_system_options["kept_heads"].'
                )

    @can_return_tuple
    @wraps(DCFormerModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsModelOutput:
        wants_logits = kwargs.pop("output_router_logits", None)
        wants_gates = kwargs.get("output_attentions", self.config.output_attentions)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        outputs = super().forward(*args, **kwargs, return_dict=True)
        layers: Any = self.layers[: self.config.num_hidden_layers]
        systems = [layer.self_attn.system for layer in layers]
        self._extras = extras(systems, mask, self.training, wants_logits, wants_gates)
        return HeadSystemsModelOutput(**outputs, **self._extras)


def _share(labels: Any = None, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any) -> Any:
    """`share_of_labels` of those that are predicted."""
    if labels is None and shift_labels is None:
        return 1
    return share_of_labels(labels[..., 1:] if shift_labels is None else shift_labels, num_items_in_batch)


class HeadSystemsForCausalLM(HeadSystemsPreTrainedModel, DCFormerForCausalLM):
    """The language model."""

    decoder_class = HeadSystemsModel

    @can_return_tuple
    @wraps(DCFormerForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsCausalLMOutput:
        outputs = super().forward(*args, **kwargs, return_dict=True)
        return finished(self, HeadSystemsCausalLMOutput, outputs, _share(**kwargs))

    def _get_static_cache_init_shape(self) -> tuple[Any, Any] | None:
        """None, to allocate static caches on the first forward, where the cache is not that of plain attention."""
        systems = [layer.self_attn.system for layer in self.model.layers]
        plain = (self.config.num_key_value_heads, (self.config.head_dim, self.config.head_dim))
        is_plain = all((system.cache_heads, system.cache_widths) == plain for system in systems)
        return super()._get_static_cache_init_shape() if is_plain else None


class HeadSystemsForSequenceClassification(HeadOfDecoder, GenericForSequenceClassification, HeadSystemsPreTrainedModel):
    """The decoder with a classifier of whole sequences."""

    def decoders(self) -> tuple[Any, ...]:
        return (HeadSystemsModel,)

    @can_return_tuple
    @wraps(GenericForSequenceClassification.forward)
    def forward(self, *args: Any, **kwargs: Any) -> HeadSystemsSequenceClassifierOutput:
        return finished(self, HeadSystemsSequenceClassifierOutput, super().forward(*args, **kwargs, return_dict=True))


__all__ = ["HeadSystemsForCausalLM", "HeadSystemsForSequenceClassification", "HeadSystemsModel"]
