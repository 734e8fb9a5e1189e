"""RALA, rank-augmented linear attention, CVPR 2025, https://arxiv.org/abs/2411.07635, as in RAVLT's released code.

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


def rala(q, k, v, grid):
    """Queries, keys and values (batch, heads, height · width, width of a head) to an output of the same shape."""
    q, k = elu(q) + 1, elu(k) + 1
    alpha = (k @ q.mean(-2).unsqueeze(-1) * q.shape[-1] ** -0.5).softmax(-2)  # the weight of each token
    state = rotate(k, grid).mT @ (alpha * v)
    mass = q @ (alpha * k).sum(-2).unsqueeze(-1)  # without the rotation
    return rotate(q, grid) @ state / (mass + 1e-6)
