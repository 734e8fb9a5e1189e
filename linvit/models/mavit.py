"""MAViT: vision transformer with magnitude-aware linear attention (MALA).

Rectifying Magnitude Neglect in Linear Attention, ICCV 2025, https://arxiv.org/abs/2507.00698

    S_i = s · κ(q_i) · mean_j κ(k_j),  κ = elu + 1,  s = 1/√width
    y_i = s · Rκ(q_i) · mean_j Rκ(k_j) ⊗ v_j · (1 + 1/(S_i + ε))  -  S_i · mean_j v_j
    out = proj((y + LePE(v)) · φ(x))

Axes: feature map elu1, weighting uniform, normalizer magnitude, rotation 2-D RoPE (numerator only).

Where paper and released code differ, the code is followed: the paper sums over the keys where the code takes the mean
and divides by √width, and it says nothing of RoPE, LePE and φ(x).

| size  | widths           | depths      | heads      | final | parameters |
|-------|------------------|-------------|------------|-------|------------|
| tiny  | 64 128 256 512   | 2 2 6 2     | 1 2 4 8    |  2048 | 16,449,128 |
| small | 64 128 320 512   | 3 5 9 3     | 1 2 5 8    |  2048 | 27,142,568 |
| base  | 96 192 384 512   | 4 6 12 6    | 1 2 6 8    |  2048 | 49,792,648 |
| large | 96 192 448 640   | 4 7 19 8    | 1 2 7 10   |  2560 | 97,766,088 |

The released weights and the published accuracies use softmax attention in stages 3 and 4 (pattern "LLSS", the default)
although the paper speaks of linear attention throughout; that is the `_linear` twin of each size (pattern "LLLL"), for
which there are no published weights. The nano size is ours, for images of 32 to 64 px, and linear throughout.
"""

from timm.models import generate_default_cfgs

from linvit.models.family import imagenet_cfg, register
from linvit.models.pyramid import SIZES, Pyramid, create_pyramid


class MAViT(Pyramid):
    """The pyramid with MALA as its linear attention; arguments of Pyramid."""

    linear = "mala"


_FINAL_WIDTHS = {"nano": 128, "tiny": 2048, "small": 2048, "base": 2048, "large": 2560}


def _released(size: str) -> dict:
    # The authors name the hub repository but none of its files; these names follow those of their RAVLT files.
    return imagenet_cfg(hf_hub_id="aldjalkdf/MAViT", hf_hub_filename=f"MAViT_{size}.pth")


default_cfgs = generate_default_cfgs(
    {
        "mavit_nano.untrained": imagenet_cfg(input_size=(3, 32, 32), pool_size=(1, 1)),
        "mavit_tiny.in1k": _released("T"),
        "mavit_tiny_linear.untrained": imagenet_cfg(),
        "mavit_small.in1k": _released("S"),
        "mavit_small_linear.untrained": imagenet_cfg(),
        "mavit_base.in1k": _released("B"),
        "mavit_base_linear.untrained": imagenet_cfg(),
        "mavit_large.in1k": _released("L"),
        "mavit_large_linear.untrained": imagenet_cfg(),
    }
)


def _create(variant: str, pretrained: bool, **kwargs) -> MAViT:
    size = variant.split("_")[1]
    pattern = {"pattern": "LLLL"} if variant.endswith("_linear") else {}
    args = {**SIZES[size], "final_width": _FINAL_WIDTHS[size], **pattern, **kwargs}
    return create_pyramid(MAViT, variant, pretrained, **args)


register(_create, default_cfgs)
