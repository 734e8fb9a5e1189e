"""Semantic FPN (https://arxiv.org/abs/1901.02446) and UperNet (https://arxiv.org/abs/1807.10221)."""

from collections.abc import Iterable
from typing import Annotated, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.errors import SettingError
from linvit.models.dense.backbone import DenseBackbone, Neck, conv_norm_relu
from linvit.models.dense.released_names import ReleasedNames
from linvit.ranges import Checked, Count, IsA, Range

Halved = Annotated[int, Range(2)]


def resized(x: Tensor, like: Tensor) -> Tensor:
    """A map resized bilinearly to the height and width of another one."""
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class Classifier(nn.Sequential):
    """Channel dropout and a 1×1 convolution."""

    def __init__(self, width: int, num_classes: int) -> None:
        conv = nn.Conv2d(width, num_classes, 1)
        super().__init__(nn.Dropout2d(0.1), conv)
        assert conv.bias is not None
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)


class SumHead(nn.Module):
    """Brings each level to stride 4 by 3×3 convolutions with batch norm, ReLU and upsampling, and adds all levels.

    Args:
        in_width: channels of the four levels.
        width: channels of the sum.
        num_classes: number of classes.
    """

    def __init__(self, in_width: int, width: int, num_classes: int) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(conv_norm_relu(width if i else in_width, width) for i in range(max(level, 1)))
            for level in range(4)
        )
        self.classifier = Classifier(width, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        levels = []
        for level, (units, x) in enumerate(zip(cast(Iterable[nn.ModuleList], self.levels), maps, strict=True)):
            for unit in units:
                x = unit(x)
                if level:
                    x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            levels.append(resized(x, maps[0]) if level else x)
        return self.classifier(sum(levels))


class PyramidPooling(nn.Module):
    """The coarsest map and its means over grids of 1×1, 2×2, 3×3 and 6×6 cells, fused by a 3×3 convolution."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.sides = (1, 2, 3, 6)
        self.pooled = nn.ModuleList(conv_norm_relu(in_width, width, 1) for _ in self.sides)
        self.fuse = conv_norm_relu(in_width + len(self.sides) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        pooled = (unit(F.adaptive_avg_pool2d(x, side)) for unit, side in zip(self.pooled, self.sides, strict=True))
        return self.fuse(torch.cat([x, *(resized(means, x) for means in pooled)], dim=1))


class PerceptionHead(nn.Module):
    """UperNet's head: pyramid pooling on the coarsest map, a feature pyramid, all levels fused at stride 4.

    Args:
        in_widths: channels of the four maps.
        width: channels inside.
        num_classes: number of classes.
    """

    def __init__(self, in_widths: tuple[int, ...], width: int, num_classes: int) -> None:
        super().__init__()
        self.pooling = PyramidPooling(in_widths[-1], width)
        self.inner = nn.ModuleList(conv_norm_relu(channels, width, 1) for channels in in_widths[:-1])
        self.outer = nn.ModuleList(conv_norm_relu(width, width) for _ in in_widths[:-1])
        self.fuse = conv_norm_relu(len(in_widths) * width, width)
        self.classifier = Classifier(width, num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        x = self.pooling(maps[-1])
        levels = [x]
        for inner, outer, finer in zip(reversed(self.inner), reversed(self.outer), reversed(maps[:-1]), strict=True):
            lateral = inner(finer)
            x = lateral + resized(x, lateral)
            levels.insert(0, outer(x))
        return self.classifier(self.fuse(torch.cat([resized(level, levels[0]) for level in levels], dim=1)))


class SemanticFPN(Checked, ReleasedNames, nn.Module):
    """Feature pyramid, and a head of half its width that adds up the levels.

    Images (batch, 3, height, width) to logits (batch, num_classes, height, width).

    Args:
        backbone: returns four maps.
        num_classes: number of classes.
        width: channels of the pyramid.
    """

    framework = "semantic_fpn"
    backbone_prefix = "backbone."

    def __init__(
        self, backbone: Annotated[DenseBackbone, IsA(DenseBackbone)], num_classes: Count, width: Halved = 256
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = Neck(backbone.channels, width)
        self.head = SumHead(width, width // 2, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        maps = list(self.neck(self.backbone(images)).values())
        return resized(self.head(maps), images)


class UperNet(Checked, ReleasedNames, nn.Module):
    """Pyramid pooling and perception head, and an auxiliary head of half its width on the map at stride 16.

    Images (batch, 3, height, width) to logits (batch, num_classes, height, width) in evaluation. In training to
    {"out": logits, "aux": logits of the auxiliary head}, for at least two images, because the pooled means go through a
    batch norm.

    Args:
        backbone: returns four maps.
        num_classes: number of classes.
        width: channels of the head.
    """

    framework = "upernet"
    backbone_prefix = "backbone."

    def __init__(
        self, backbone: Annotated[DenseBackbone, IsA(DenseBackbone)], num_classes: Count, width: Halved = 512
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = PerceptionHead(backbone.channels, width, num_classes)
        unit = conv_norm_relu(backbone.channels[2], width // 2)
        self.aux = nn.Sequential(unit, Classifier(width // 2, num_classes))

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        if self.training and isinstance(images, Tensor) and images.shape[:1] == (1,):
            raise SettingError(
                "UperNet got one image in training, expected 2 or more, because batch norms follow its pooled means:"
                " set `batch_size` higher."
            )
        maps = self.backbone(images)
        out = resized(self.head(maps), images)
        return {"out": out, "aux": resized(self.aux(maps[2]), images)} if self.training else out
