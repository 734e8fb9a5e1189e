"""H-ViT³: a pyramid whose attention is one step of gradient descent on each image.

ViT³: Unlocking Test-Time Training in Vision, CVPR 2026, https://arxiv.org/abs/2512.01643

The layer is that of `linvit.models.vittt`, with MLLA's rotation of queries and keys. Every block begins with a 3×3
depthwise convolution and has another in its feed-forward, with a GELU on either side. Stem and downsampling are
convolutions with ReLU. A batch norm and the mean of all positions precede the classifier, as released. The released
network has tables of rotations for one size of image, ours reads any.

| size  | widths         | depths   | heads      | parameters |
|-------|----------------|----------|------------|------------|
| tiny  | 64 128 320 512 | 1 3 9 4  | 2 4 10 16  | 28,703,560 |
| small | 64 128 320 512 | 2 6 18 8 | 2 4 10 16  | 54,362,056 |
| base  | 96 192 448 640 | 2 6 18 8 | 3 6 14 20  | 94,369,304 |

The published accuracies are those of networks trained with MESA, a loss of the authors' recipe. They offer weights for
ImageNet-1k, in files that are not read here; none are published under these names.
"""

from typing import Annotated, Any, cast

from timm.layers import calculate_drop_path_rates
from timm.models import generate_default_cfgs
from torch import nn

from linvit.layers.block import InnerStepBlock
from linvit.layers.checks import Depth, Device, Dtype, Rate, Ratio, TensorOptions, multiple_of_heads
from linvit.layers.patches import InvertedDownsample, ReluStem
from linvit.models.backbone import POOLS, PooledBackbone, Stage
from linvit.models.family import imagenet_cfg, register
from linvit.models.pretrained import create
from linvit.ranges import Amount, Count, OneOf

SIZES: dict[str, dict[str, Any]] = {
    "hvittt_tiny": {"drop_path_rate": 0.2},
    "hvittt_small": {"depths": (2, 6, 18, 8), "drop_path_rate": 0.4},
    "hvittt_base": {
        "widths": (96, 192, 448, 640),
        "depths": (2, 6, 18, 8),
        "heads": (3, 6, 14, 20),
        "drop_path_rate": 0.6,
    },
}


class HViTTT(PooledBackbone):
    """Stem, four stages at strides 4, 8, 16, 32 of InnerStepBlock, a batch norm, a linear classifier.

    Args:
        in_chans: channels of the images.
        num_classes: outputs of the classifier, 0 for no classifier.
        global_pool: pooling before the classifier, a name in POOLS; "" to apply it at every position.
        widths, depths, heads: channels, blocks and heads of each stage.
        ffn_ratio: hidden channels of the feed-forward over width.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 over all blocks.

    Raises TypeError or ValueError for an argument outside its range; on forward for anything but floating-point images
    with in_chans channels and sides of at least 32 px.
    """

    def __init__(
        self,
        in_chans: Count = 3,
        num_classes: Amount = 1000,
        global_pool: Annotated[str, OneOf(POOLS)] = "avg",
        widths: tuple[Count, Count, Count, Count] = (64, 128, 320, 512),
        depths: tuple[Depth, Depth, Depth, Depth] = (1, 3, 9, 4),
        heads: tuple[Count, Count, Count, Count] = (2, 4, 10, 16),
        ffn_ratio: Ratio = 4.0,
        drop_rate: Rate = 0.0,
        drop_path_rate: Rate = 0.0,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__(in_chans, num_classes, drop_rate, "LLLL", widths)
        dd: TensorOptions = {"device": device, "dtype": dtype}
        for width, number in zip(widths, heads, strict=True):
            multiple_of_heads(width, number)
        rates = cast(list[list[float]], calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True))
        self.stem = ReluStem(in_chans, widths[0], **dd)
        self.stages = nn.Sequential()
        for i, width in enumerate(widths):
            downsample = InvertedDownsample(widths[i - 1], width, **dd) if i else nn.Identity()
            self.stages.append(
                Stage(downsample, [InnerStepBlock(width, heads[i], ffn_ratio, r, **dd) for r in rates[i]])
            )
        self.final_conv = nn.BatchNorm2d(widths[-1], **dd)
        self.add_head(widths[-1], global_pool, **dd)


default_cfgs = generate_default_cfgs({f"{name}.untrained": imagenet_cfg() for name in SIZES})


def _create(name: str, pretrained: bool, **kwargs: Any) -> nn.Module:
    return create(HViTTT, name, pretrained, **{**SIZES[name], **kwargs})


register(_create, SIZES, __name__)
