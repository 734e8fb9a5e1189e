"""MHLA, linear attention by blocks of tokens, ICLR 2026, https://arxiv.org/abs/2601.07832, Eq. 4 with κ = relu + 1e-6.

The released code has another denominator, of other blocks' queries. Its layer normalizes the input, and q and k over
all channels, adds a 5×5 depthwise convolution of v to the output and projects it, and it keeps the matrix in [0, 1].
"""

import torch


def first_mixing(rows, columns):
    """The matrix to start with: nearer blocks count more, and columns have the sum 1; for two blocks or more."""
    places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double()
    apart = (places[:, None] - places).norm(dim=-1)
    near = 1 - apart / apart.max()
    return near / near.sum(0)


def mhla(q, k, v, mixing, blocks, grid):
    """Queries, keys and values (batch, heads, height · width, width of a head) to an output of the same shape.

    mixing: what a query of block i takes of each block b, (M, M). blocks: (rows, columns), which divide the grid.
    """
    (rows, columns), (height, width) = blocks, grid
    sides = (rows, height // rows, columns, width // columns)

    def split(x):  # (batch, heads, M, tokens of a block, width)
        return x.unflatten(2, sides).transpose(3, 4).flatten(4, 5).flatten(2, 3)

    q, k, v = split(q.relu() + 1e-6), split(k.relu() + 1e-6), split(v)
    state = torch.einsum("ib,zhbde->zhide", mixing, k.mT @ v)
    mass = torch.einsum("ib,zhbd->zhid", mixing, k.sum(-2))
    tokens = k.shape[-2] * mixing.sum(-1)[:, None, None]
    out = q @ state / (q @ mass.unsqueeze(-1) + 1e-6 * tokens)
    return out.unflatten(2, (rows, columns)).unflatten(4, sides[1::2]).transpose(3, 4).flatten(2, 5)
