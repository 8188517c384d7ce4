"""Options of collaborative heads."""

from dataclasses import dataclass
from typing import Any

from .options import HeadSizes, HeadSystemOptions, check_bool, check_range


@dataclass(frozen=True)
class CollaborativeOptions(HeadSystemOptions):
    """Options of collaborative heads.

    Attributes:
        shared_key_query_dim: Dk; H·D, at which plain attention can be copied, when not given.
        mixing_init: "normal" with standard deviation 0.2 (the authors'), "ones", or "concatenate": every head its own
            part of the channels, at H·D as in plain attention. "normal" when not given, "concatenate" in what is made
            from plain attention.
        content_bias: whether there is a B.
        scaling: factor of the scores; D^-0.5 when not given, whatever Dk is.
    """

    shared_key_query_dim: int | None = None
    mixing_init: str | None = None
    content_bias: bool = False
    scaling: float | None = None

    def check(self, sizes: HeadSizes) -> None:
        """Refuses dims that are out of range, halves of rotated pairs, parts of normalized blocks, unknown names."""
        name, dims, most = "shared_key_query_dim", self.shared_key_query_dim, sizes.num_heads * sizes.head_dim
        if dims is not None:
            check_range(name, dims, 2 if sizes.rotary_dim else 1, most, "num_attention_heads * head_dim")
            if sizes.rotary_dim and dims % 2:
                raise ValueError(f"{name}={dims} must be even, from 2 to {most}: RoPE rotates channels in pairs.")
            if sizes.qk_norm and dims % sizes.head_dim:
                blocks = f"head_dim={sizes.head_dim}, up to {most}: qk_norm normalizes blocks of them"
                raise ValueError(f"{name}={dims} must be a multiple of {blocks}. Choose one, or switch qk_norm off.")
        if self.mixing_init not in (None, "normal", "ones", "concatenate"):
            raise ValueError(f"mixing_init={self.mixing_init!r}: expected 'normal', 'ones' or 'concatenate'.")
        check_bool("content_bias", self.content_bias)
        if self.scaling is not None:
            check_range("scaling", self.scaling, 1e-6, 1e6, "a factor of the scores")

    @classmethod
    def for_conversion(cls, has_lost_biases: bool) -> dict[str, Any]:
        """Every head its own part of the channels; what the queries' biases do as a content bias."""
        return {"mixing_init": "concatenate", "content_bias": has_lost_biases}


__all__ = ["CollaborativeOptions"]
