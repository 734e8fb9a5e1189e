"""Asserts what `linvit.bench.exactness` measures."""

import torch

from linvit.bench.exactness import KERNEL, PLAIN, deviations


def judge(tensors, dtype=torch.float32, kernel=KERNEL, twin=PLAIN, gradients=True, **options):
    """Asserts that output and gradients of the kernel are as good as the twin's; the shares of their allowed errors."""
    rows = deviations(tensors, dtype, kernel, twin, **options)
    for row in rows if gradients else rows[:1]:
        assert row.error <= row.allowed, f"{row.name}: error {row.error:.1e}, allowed are {row.allowed:.1e}"
    return [row.error / row.allowed for row in rows]
