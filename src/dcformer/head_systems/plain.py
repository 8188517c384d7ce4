"""Plain attention, as a head system: what all others are compared with."""

from .base import HeadSystem


class Plain(HeadSystem):
    """The base class does it all."""

    splits_by_heads = True


__all__ = ["Plain"]
