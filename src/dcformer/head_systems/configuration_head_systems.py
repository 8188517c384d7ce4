"""`HeadSystemsConfig`: a DCFormer whose heads interact in another way, too."""

from huggingface_hub.dataclasses import strict

from ..configuration_dcformer import DCFormerConfig
from ..heads_dcformer import HEAD_FIELDS
from .options import OptionsOfLayers
from .registry import options_of, sizes_of, system_class


def own_head_fields(config: DCFormerConfig) -> list[str]:
    """The fields of a configuration, such as "head_embeddings", that attention with a head system has no use for."""
    return [name for name in HEAD_FIELDS if getattr(config, name, None) is not None]


@strict
class HeadSystemsConfig(OptionsOfLayers, DCFormerConfig):
    """Configuration of a DCFormer with a head system, model type "dcformer_heads".

    All fields of `DCFormerConfig` stay, composition among them, which is on unless it is switched off.

    Args:
        head_system (`str`): a name of `HEAD_SYSTEMS`, such as "collaborative".
        head_system_options (`dict`, *optional*): options of the system's own dataclass.

    Raises:
        ValueError: on an unknown system or option, and on options that do not fit the model.
    """

    model_type = "dcformer_heads"
    keys_to_ignore_at_inference = ["past_key_values", "cache", "aux_loss", "router_logits", "head_gates"]

    head_system: str = "plain"
    head_system_options: dict | None = None

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # as in DCFormerConfig
        """Module or parameter of the decoder -> style of tensor parallelism; the system holds the projections."""
        plan: dict[str, str] = super().base_model_tp_plan
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"layers.*.self_attn.system.{name}"] = plan.pop(f"layers.*.self_attn.{name}")
        own = system_class(self.head_system).tp_plan
        return plan | {f"layers.*.self_attn.system.{name}": style for name, style in own.items()}

    def validate_architecture(self):
        """As `DCFormerConfig`'s, and checks the head system and its options for every layer."""
        super().validate_architecture()
        if fields := own_head_fields(self):
            raise ValueError(f"{' and '.join(fields)} are of the attention without a head system: leave them unset.")
        options = options_of(self)
        for layer in range(self.num_hidden_layers):
            options.check(sizes_of(self, layer))
        options.check_config(self)


__all__ = ["HeadSystemsConfig", "own_head_fields"]
