"""Sizes of blocks and grids, in plain Python: on the host `triton.cdiv` and its like are slower."""


def ceil_div(length: int, size: int) -> int:
    """How many blocks of a size hold a length."""
    return -(-length // size)


def round_up(length: int, step: int) -> int:
    """The least multiple of a step that holds a length."""
    return -(-length // step) * step


def power_of_2(length: int) -> int:
    """The least power of two that holds a length; 1 for none."""
    return 1 << max(0, length - 1).bit_length()


__all__ = ["ceil_div", "power_of_2", "round_up"]
