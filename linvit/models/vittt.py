"""ViT³: a plain vision transformer whose attention is one step of gradient descent on each image.

ViT³: Unlocking Test-Time Training in Vision, CVPR 2026, https://arxiv.org/abs/2512.01643

    W' = W - G/(1 + ‖G‖),  G = ∂(-mean_t f(k_t)·v_t / 3)/∂W,  y_t = f(q_t),  f(x) = (x W₁) ⊙ SiLU(x W₂)

and the same for a 3×3 kernel on a head of its own, see `linvit.layers.recent_mechanisms.InnerStepAttention`. DeiT with
this layer, without a class token and a table of positions: a 3×3 depthwise convolution is added before each block, and
the classifier reads the mean of the normed tokens, as released.

| size  | width | depth | heads | parameters |
|-------|-------|-------|-------|------------|
| tiny  | 192   | 12    | 6     |  6,149,416 |
| small | 384   | 12    | 6     | 23,799,400 |
| base  | 768   | 12    | 12    | 90,055,912 |

The authors offer weights for ImageNet-1k, in a file that is not read here; none are published under these names. Their
pyramid, H-ViT³, is `linvit.models.hvittt`.
"""

from functools import partial
from typing import Any

from timm.models import generate_default_cfgs
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from linvit.layers.swapped import LocalBlock
from linvit.models.family import imagenet_cfg, register
from linvit.models.pretrained import create
from linvit.models.swap import build_swapped

SIZES: dict[str, dict[str, Any]] = {
    "vit_ttt_tiny": {"embed_dim": 192, "num_heads": 6},
    "vit_ttt_small": {"embed_dim": 384, "num_heads": 6},
    "vit_ttt_base": {"embed_dim": 768, "num_heads": 12},
}


BODY = partial(VisionTransformer, block_fn=LocalBlock, pos_embed="none", fc_norm=False)
default_cfgs = generate_default_cfgs(
    {
        f"{name}.untrained": imagenet_cfg(
            fixed_input_size=True, crop_pct=0.9, first_conv="patch_embed.proj", pool_size=None, classifier="head"
        )
        for name in SIZES
    }
)


def _create(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    arguments = {"patch_size": 16, "depth": 12, "class_token": False, "global_pool": "avg", **SIZES[name], **kwargs}
    feature_cfg = {"feature_cls": "getter", "out_indices": 3}
    return create(partial(build_swapped, BODY, "vittt"), name, pretrained, feature_cfg, pattern=None, **arguments)


register(_create, SIZES, __name__)
