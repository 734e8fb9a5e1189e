"""PolaFormer++'s attention (https://github.com/ZacharyMeng/PolaFormerPP, 2025; there is no paper), as in its code.

The network adds a 5×5 depthwise convolution of v to the output, multiplies it by a linear layer of its input, and
projects it. Learned, initially 0: s1, s2.
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


def polaformer_pp(q, k, v, s1, s2, grid):
    """Queries, keys and values (batch, heads, height · width, width) to an output of the same shape.

    s1, s2: (heads, 1, 2 · width). Half of the values is read by scores of equal signs, half by those of opposite signs.
    """
    key = torch.cat((k, -k), dim=-1).relu().expm1()
    signed = torch.cat((q, -q), dim=-1)
    out = []
    for query, values in zip((s1.sigmoid() * signed, s2.sigmoid() * -signed), v.chunk(2, dim=-1), strict=True):
        query = query.relu().expm1()
        num = rotate(query, grid) @ (rotate(key, grid).mT @ values / k.shape[-2])
        out.append(num / (query @ key.mean(-2).unsqueeze(-1) + 1e-6))
    return torch.cat(out, dim=-1)
