"""MALA, magnitude-aware linear attention, ICCV 2025, https://arxiv.org/abs/2507.00698, as in MAViT's released code.

The network adds a 5×5 depthwise convolution of v to the output, multiplies it by a linear layer of its input, and
projects it.
"""

import torch
from torch.nn.functional import elu


def rotate(x, grid):
    """Each pair of neighbouring channels turned by the row (first half) or column (second half) of its token."""
    height, width = grid
    frequency = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 4, dtype=x.dtype, device=x.device)
    row = torch.arange(height, device=x.device).repeat_interleave(width)
    column = torch.arange(width, device=x.device).repeat(height)
    angle = torch.cat((row[:, None] * frequency, column[:, None] * frequency), dim=-1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def mala(q, k, v, grid):
    """Queries, keys and values (batch, heads, height · width, width of a head) to an output of the same shape."""
    q, k, scale = elu(q) + 1, elu(k) + 1, q.shape[-1] ** -0.5
    state = rotate(k, grid).mT @ v / k.shape[-2]
    similarity = scale * (q @ k.mean(-2).unsqueeze(-1))  # the mean over the keys, without the rotation
    read = scale * (rotate(q, grid) @ state)
    return read * (1 + 1 / (similarity + 1e-6)) - similarity * v.mean(-2, keepdim=True)
