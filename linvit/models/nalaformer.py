"""NaLaFormer: the pyramid of RAVLT and MAViT with norm-aware linear attention.

Norm × Direction: Restoring the Missing Query Norm in Vision Linear Attention, ICML 2026, https://arxiv.org/abs/2506.21137

    κ(q) = [(q₊/‖q‖)^p, (q₋/‖q‖)^p],  p = 3(½ + tanh ‖q‖);  κ(k) = [k₊³, k₋³];  x₊ = relu(x), x₋ = relu(-x)
    y_i = Rκ(q_i) · mean_j Rκ(k_j) ⊗ v_j  /  (κ(q_i) · mean_j κ(k_j) + ε)
    out = proj(LayerNorm(y + LePE(v)) · SiLU(φ(x)))

Axes: feature map norm_power and relu_cubed on [q, -q] and [k, -k], weighting uniform, normalizer divide, rotation 2-D
RoPE (numerator only). A block has a 3×3 depthwise convolution before each half; softmax stages have the norm and the
gate too.

Where paper and released code differ, we follow the code: the paper maps directions through cosine and sine, with two
settings that the code does not have. Where a query is zero, the code divides zero by zero, and we read zero.

| size  | widths           | depths      | heads      | feed-forward | parameters |
|-------|------------------|-------------|------------|--------------|------------|
| xtiny | 32 64 128 384    | 2 2 2 2     | 1 2 4 12   |          3.5 |  6,142,248 |
| tiny  | 64 128 256 512   | 2 2 6 2     | 1 2 4 8    |          4   | 15,907,752 |
| small | 64 128 320 512   | 3 5 9 3     | 1 2 5 8    |          3.5 | 25,654,184 |
| base  | 96 192 384 512   | 4 6 12 6    | 1 2 6 8    |          4   | 52,002,952 |
| large | 96 192 448 640   | 4 7 19 8    | 1 2 7 10   |          3.5 | 95,426,760 |

Sizes are those of the code. The printed ones are 8 M, 15 M, 26 M, 52 M and 95 M: the code's tiny has 15 M with a
feed-forward of 3.5, and no setting that we know makes its xtiny one of 8 M.

The published accuracies belong to softmax attention in stages 3 and 4 (pattern "LLSS", the default). The authors have
announced weights and not published them (2026-07).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from timm.models import generate_default_cfgs

from linvit.layers.norm_aware import SIGNED, NormAwareBlock
from linvit.models import pyramid
from linvit.models.family import imagenet_cfg, register
from linvit.models.pyramid import Pyramid, create_pyramid


class NaLaFormer(Pyramid):
    """The pyramid with norm-aware linear attention and NormAwareBlock; arguments of Pyramid."""

    linear = SIGNED
    block_class = NormAwareBlock
    sizes: ClassVar[Mapping[str, dict[str, Any]]] = {
        "xtiny": {
            "widths": (32, 64, 128, 384),
            "depths": (2, 2, 2, 2),
            "heads": (1, 2, 4, 12),
            "drop_path_rate": 0.1,
        },
        **pyramid.SIZES,
        "tiny": {**pyramid.SIZES["tiny"], "ffn_ratio": 4.0},
        "base": {**pyramid.SIZES["base"], "ffn_ratio": 4.0},
    }


default_cfgs = generate_default_cfgs(
    {f"nalaformer_{size}.untrained": imagenet_cfg() for size in ("xtiny", "tiny", "small", "base", "large")}
)
register(partial(create_pyramid, NaLaFormer), default_cfgs, __name__)
