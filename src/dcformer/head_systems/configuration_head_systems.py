"""`HeadSystemsConfig`: a DCFormer whose heads interact in another way, too."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..configuration_dcformer import DCFormerConfig
from .options import with_lists
from .registry import options_of, sizes_of

_OF_LAYERS = ("kept_heads", "overlap")  # options that may have an entry for each layer
_OF_HEADS = ("key_head_map", "value_head_map", "head_embeddings")  # fields of attention without a head system


def own_head_fields(config: DCFormerConfig) -> list[str]:
    """The fields of a configuration, such as "head_embeddings", that attention with a head system has no use for."""
    return [name for name in _OF_HEADS if getattr(config, name, None) is not None]


@strict
class HeadSystemsConfig(DCFormerConfig):
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

    def __post_init__(self, **kwargs):
        self.head_system_options = dict(self.head_system_options or {})
        super().__post_init__(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. Fewer layers keep the options of the first, where these have an entry for each layer."""
        if name == "head_system_options":
            value = with_lists(value)
        super().__setattr__(name, value)
        fields = self.__dict__
        if name == "head_system_options":
            fields.pop("_of_all_layers", None)
        elif name == "num_hidden_layers" and (options := fields.get("head_system_options")):
            rows = fields.pop("_of_all_layers", None) or {
                option: options[option] for option in _OF_LAYERS if isinstance(options.get(option), list | tuple)
            }
            if rows and value >= 0:
                if any(value < len(row) for row in rows.values()):
                    fields["_of_all_layers"] = rows
                fields["head_system_options"] = options | {option: row[:value] for option, row in rows.items()}

    def to_dict(self) -> dict[str, Any]:
        """The fields, without what raising the number of layers again would restore."""
        fields: dict[str, Any] = super().to_dict()
        fields.pop("_of_all_layers", None)
        return fields

    @property
    def base_model_tp_plan(self) -> dict[str, str]:  # type: ignore[override]  # as in DCFormerConfig
        """Module or parameter of the decoder -> style of tensor parallelism; the system holds the projections."""
        plan: dict[str, str] = super().base_model_tp_plan
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"layers.*.self_attn.system.{name}"] = plan.pop(f"layers.*.self_attn.{name}")
        if self.head_system == "output_gate":
            plan["layers.*.self_attn.system.gate_proj"] = "colwise"
        return plan

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
