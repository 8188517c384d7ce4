"""What a head system is made from: the sizes of an attention layer, and the base of the systems' options.

Letters: E hidden size, H query heads, Hkv key/value heads, D head dim.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OF_LAYERS = ("kept_heads", "overlap")  # options that may have an entry for each layer


@dataclass(frozen=True)
class HeadSizes:
    """The attention layer that a system is for.

    Attributes:
        hidden_size, num_heads, num_kv_heads, head_dim: E, H, Hkv and D of plain attention.
        bias: whether the projections have biases.
        rotary_dim: the first channels of a head that RoPE rotates in pairs (c, c + rotary_dim / 2); 0 without RoPE.
        qk_norm: whether queries and keys are normalized over the head dim.
        layer, num_layers: which layer it is, from 0, of how many; 0 of 1 for a module of its own.
        composed: whether composition mixes the heads' maps, so that every head needs the maps of all.
        knows_layer: False for a module of its own, whatever `layer` says: what goes by the layer's number is refused.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    rotary_dim: int = 0
    qk_norm: bool = False
    layer: int = 0
    num_layers: int = 1
    composed: bool = False
    knows_layer: bool = True


@dataclass(frozen=True)
class HeadSystemOptions:
    """Options of a system: a subclass has a field for each, `check` for what fits, and `check_config` for the model."""

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> "HeadSystemOptions":
        """Options from a dictionary, as configurations store them.

        Raises:
            ValueError: on an unknown option, and on what is not a dictionary.
        """
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise ValueError(f"head_system_options={options!r}: expected a dictionary of options and their values.")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                raise ValueError(f"{name!r} is not an option of {cls.__name__}: expected {', '.join(known) or 'none'}.")
        return cls(**options)

    def check(self, sizes: HeadSizes) -> None:
        """Raises a ValueError that names field, value and range where the options do not fit a layer."""

    def check_config(self, config: Any) -> None:
        """Raises a ValueError, or warns, where the system does not go with other fields of a configuration."""

    @classmethod
    def for_conversion(cls, has_lost_biases: bool) -> dict[str, Any]:
        """What makes a conversion of plain attention exact, or as near as it can be.

        Args:
            has_lost_biases: queries have biases, and neither RoPE nor a norm, with which systems keep them as they are.
        """
        return {}


def with_lists(value: Any) -> Any:
    """Options as configurations store them: copies of dictionaries, lists and tuples, which become lists."""
    if isinstance(value, dict):
        return {name: with_lists(option) for name, option in value.items()}
    return [with_lists(row) for row in value] if isinstance(value, list | tuple) else value


def check_bool(name: str, value: Any) -> None:
    """Raises a ValueError that names an option and its value unless it is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: expected True or False.")


def check_range(name: str, value: Any, least: float, most: float, why: str) -> None:
    """Raises a ValueError that names an option, its value and its range; `why` says where the range comes from."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = isinstance(least, int) and isinstance(most, int)
    if not is_number or (whole and not isinstance(value, int)) or not least <= value <= most:
        kind = "a whole number" if whole else "a number"
        raise ValueError(f"{name}={value!r} must be {kind} from {least} to {most} ({why}).")


class OptionsOfLayers:
    """What a configuration with `head_system_options` does beside its base: they are copied, and fewer layers keep the
    options of the first, where these have an entry for each layer."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, with_lists(value or {}) if name == "head_system_options" else value)
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
        fields: dict[str, Any] = super().to_dict()  # type: ignore[misc]  # a configuration's
        fields.pop("_of_all_layers", None)
        return fields


__all__ = ["HeadSizes", "HeadSystemOptions", "OptionsOfLayers", "check_bool", "check_range"]
