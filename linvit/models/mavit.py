"""MAViT: vision transformer with magnitude-aware linear attention (MALA).

Rectifying Magnitude Neglect in Linear Attention, ICCV 2025, https://arxiv.org/abs/2507.00698

    S_i = s · κ(q_i) · mean_j κ(k_j),  κ = elu + 1,  s = 1/√width
    y_i = s · Rκ(q_i) · mean_j Rκ(k_j) ⊗ v_j · (1 + 1/(S_i + ε))  -  S_i · mean_j v_j
    out = proj((y + LePE(v)) · φ(x))

Axes: feature map elu1, weighting uniform, normalizer magnitude, rotation 2-D RoPE (numerator only).

Where paper and released code differ, we follow the code: the paper sums over the keys, the code takes the mean and
divides by √width; and the paper does not mention RoPE, LePE and φ(x).

| size  | widths           | depths      | heads      | final | parameters |
|-------|------------------|-------------|------------|-------|------------|
| tiny  | 64 128 256 512   | 2 2 6 2     | 1 2 4 8    |  2048 | 16,449,128 |
| small | 64 128 320 512   | 3 5 9 3     | 1 2 5 8    |  2048 | 27,142,568 |
| base  | 96 192 384 512   | 4 6 12 6    | 1 2 6 8    |  2048 | 49,792,648 |
| large | 96 192 448 640   | 4 7 19 8    | 1 2 7 10   |  2560 | 97,766,088 |

The released weights and the published accuracies use softmax attention in stages 3 and 4 (pattern "LLSS", the default)
although the paper speaks of linear attention throughout; that is the `_linear` variant of each size (pattern "LLLL"),
which has no published weights. The nano size is ours: for images of 32 to 64 px, and linear throughout.
"""

from functools import partial
from typing import ClassVar

from linvit.models.family import register
from linvit.models.pyramid import Pyramid, create_pyramid, pyramid_cfgs


class MAViT(Pyramid):
    """The pyramid with MALA as its linear attention; arguments of Pyramid."""

    linear = "mala"
    final_widths: ClassVar[dict[str, int]] = {"tiny": 2048, "small": 2048, "base": 2048, "large": 2560}


# The authors name the hub repository but none of its files; these names follow those of their RAVLT files.
default_cfgs = pyramid_cfgs("MAViT")
register(partial(create_pyramid, MAViT), default_cfgs, __name__)
