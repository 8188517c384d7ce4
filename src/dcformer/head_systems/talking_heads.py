"""Talking heads (arXiv 2003.02436) are the static part of composition: nothing is added but a name and a conversion.

    A'[m] = Σ_j A[j] P_pre[j, m] before mask and softmax, W'[m] = Σ_j W[j] P_post[j, m] after

Composition keeps a skip connection, P = I + static, so that any P can be had. Fewer or more heads between the two
projections, the paper's general form, are not offered.
"""

from dataclasses import dataclass
from typing import Any

import torch

from .base import HeadSystem
from .options import HeadSystemOptions

SETTINGS = {"compose_static": True, "compose_query": False, "compose_key": False}


@dataclass(frozen=True)
class TalkingHeadsOptions(HeadSystemOptions):
    """No options: `compose_pre` and `compose_post` say which of the two projections there are."""

    def check_config(self, config: Any) -> None:
        """Refuses composition that is not static alone."""
        wrong = {name: getattr(config, name) for name, value in SETTINGS.items() if getattr(config, name) != value}
        if wrong:
            expected = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
            raise ValueError(
                f"head_system='talking_heads' with {', '.join(f'{name}={value}' for name, value in wrong.items())}: "
                f"talking heads are static composition alone. Set {expected}."
            )


class TalkingHeads(HeadSystem):
    """Plain projections; `DCFormerCompose` mixes the maps."""

    options_class = TalkingHeadsOptions
    splits_by_heads = True


def from_talking_heads(projection: torch.Tensor) -> torch.Tensor:
    """The static projection of composition that equals one of talking heads.

    Args:
        projection: P [H, H], from head (row) to head (column); with groups [G, M, M].

    Returns:
        `compose.pre_static` or `compose.post_static`, [H, M]: P without the identity.

    Raises:
        ValueError: when it is not square.
    """
    if projection.ndim not in (2, 3) or projection.shape[-1] != projection.shape[-2]:
        raise ValueError(f"projection of shape {tuple(projection.shape)}: expected [H, H], or [G, M, M] with groups.")
    return (projection - torch.eye(projection.shape[-1], dtype=projection.dtype, device=projection.device)).flatten(
        0, -2
    )


__all__ = ["SETTINGS", "TalkingHeads", "TalkingHeadsOptions", "from_talking_heads"]
