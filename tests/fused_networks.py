"""Networks in which no norm, scale, bias or statistic has the value at which leaving it out changes nothing."""

import torch

from linvit.bench.networks import randomised as randomised


def images(height: int, width: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(0))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over largest value."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    return ((got - expected).abs().max() / expected.abs().max()).item()
