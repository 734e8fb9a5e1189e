"""RAVLT: vision transformer with rank-augmented linear attention (RALA).

Breaking the Low-Rank Dilemma of Linear Attention, CVPR 2025, https://arxiv.org/abs/2411.07635

    α_j = softmax_j(s · mean_i κ(q_i) · κ(k_j)),  κ = elu + 1,  s = 1/√width
    y_i = Rκ(q_i) · Σ_j α_j Rκ(k_j) ⊗ v_j  /  (κ(q_i) · Σ_j α_j κ(k_j) + ε)
    out = proj((y + LePE(v)) · φ(x))

Axes: feature map elu1, weighting query_mean, normalizer divide, rotation 2-D RoPE (numerator only).

Where paper and released code differ, we follow the code: the paper averages raw queries, has no scale in the
softmax, no LePE and no RoPE. Its Equation 2 has the normalizer, which Section 3.2 sets aside to study ranks. Its α
sum to N (Equation 4) instead of 1; the normalizer cancels this factor, up to ε.

| size  | widths           | depths      | heads      | final | parameters |
|-------|------------------|-------------|------------|-------|------------|
| tiny  | 64 128 256 512   | 2 2 6 2     | 1 2 4 8    |  1024 | 14,897,768 |
| small | 64 128 320 512   | 3 5 9 3     | 1 2 5 8    |  1024 | 25,591,208 |
| base  | 96 192 384 512   | 4 6 12 6    | 1 2 6 8    |  1024 | 48,241,288 |
| large | 96 192 448 640   | 4 7 19 8    | 1 2 7 10   |  1024 | 95,242,440 |

The released weights and the published accuracies use softmax attention in stages 3 and 4 (pattern "LLSS", the default)
although the paper speaks of linear attention throughout; that is the `_linear` variant of each size (pattern "LLLL"),
which has no published weights. The nano size is ours: for images of 32 to 64 px, and linear throughout.
"""

from functools import partial

from linvit.models.family import register
from linvit.models.pyramid import Pyramid, create_pyramid, pyramid_cfgs


class RAVLT(Pyramid):
    """The pyramid with RALA as its linear attention; arguments of Pyramid."""

    linear = "rala"


default_cfgs = pyramid_cfgs("RAVLT")
register(partial(create_pyramid, RAVLT), default_cfgs, __name__)
