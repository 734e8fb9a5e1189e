"""Maps with their channels last: a view, where the memory is so already."""

from torch import Tensor


def last(x: Tensor) -> Tensor:
    """(batch, channels, height, width) as (batch, height, width, channels)."""
    return x.permute(0, 2, 3, 1)


def first(x: Tensor) -> Tensor:
    """(batch, height, width, channels) as (batch, channels, height, width)."""
    return x.permute(0, 3, 1, 2)
