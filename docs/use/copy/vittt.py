"""ViT³'s inner step, CVPR 2026, https://arxiv.org/abs/2512.01643: one step of gradient descent, with rate 1, per image.

Its layer projects q, k and v twice, for each head of `vittt` and for one more head of `vittt_local`, and projects both
outputs together. Learned and initially small: w1, w2, w3.
"""

import torch
from torch.nn.functional import conv2d, pad, silu


def step(weight, gradient):
    """Columns of the gradient are divided by 1 plus their norm."""
    return weight - gradient / (1 + gradient.norm(dim=-2, keepdim=True))


def vittt(q, k, v, w1, w2):
    """(batch, heads, tokens, width) each, w1 and w2 (heads, width, width): f(q) with f(x) = (x w1) · silu(x w2).

    The step lowers -mean(f(k) · v) / 3, whose gradients by w1 and w2 are written out.
    """
    z1, z2 = k @ w1, k @ w2
    gate = z2.sigmoid()
    share = -v / (3 * k.shape[-2])
    w1 = step(w1, k.mT @ (share * silu(z2)))
    w2 = step(w2, k.mT @ (share * z1 * gate * (1 + z2 * (1 - gate))))
    return (q @ w1) * silu(q @ w2)


def vittt_local(q, k, v, w3):
    """The same for a 3×3 depthwise convolution: maps (batch, width, height, width of the map), w3 (width, 3, 3)."""
    batch, channels, height, width = k.shape
    share, padded = -v / (3 * height * width), pad(k, (1, 1, 1, 1))
    taps = [(padded[..., i : i + height, j : j + width] * share).sum((2, 3)) for i in range(3) for j in range(3)]
    kernel = step(w3.flatten(1).unsqueeze(-1), torch.stack(taps, dim=-1).unsqueeze(-1))
    groups = batch * channels
    return conv2d(q.reshape(1, groups, height, width), kernel.view(groups, 1, 3, 3), padding=1, groups=groups).view_as(
        q
    )
