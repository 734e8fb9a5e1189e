"""NaLaFormer's norm-aware linear attention, ICML 2026, https://arxiv.org/abs/2506.21137, as in its released code.

The network adds a 5×5 depthwise convolution of v to the output, normalizes all heads together (LayerNorm), multiplies
by the SiLU of a linear layer of its input, and projects it.
"""

import torch


def rotate(x, grid):
    """Each pair of neighbouring channels turned by the row (first half) or column (second half) of its token."""
    height, width = grid
    frequency = 10000 ** -torch.linspace(0, 1, x.shape[-1] // 4, dtype=x.dtype, device=x.device)
    row = torch.arange(height, device=x.device).repeat_interleave(width)
    column = torch.arange(width, device=x.device).repeat(height)
    angle = torch.cat((row[:, None] * frequency, column[:, None] * frequency), dim=-1)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def nala(q, k, v, grid):
    """Queries, keys and values (batch, heads, height · width, width of a head) to an output of the same shape."""
    norm = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + norm.tanh())
    direction = q / norm.clamp(min=1e-12)  # a query of zeros reads zero
    num = den = 0
    for sign in (1, -1):
        query, key = (sign * direction).relu() ** power, (sign * k).relu() ** 3
        num = num + rotate(query, grid) @ (rotate(key, grid).mT @ v / k.shape[-2])
        den = den + query @ key.mean(-2).unsqueeze(-1)
    return num / (den + 1e-6)
