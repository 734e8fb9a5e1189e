"""The cost of detectors and segmentors as the papers' tables count it, and the rows that print it."""

from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from evidence.published import CONTENT, ROWS, Row
from linvit.analysis.cost import Cost, count_pass
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import DETECTORS, FRAMEWORKS
from linvit.models.dense.retinanet import RetinaNet

DETECTION_SIZE = (800, 1280)
SEGMENTATION_SIZE = (512, 2048)
BOX_REGIONS, MASK_REGIONS = 1000, 100
TABLES: Mapping[str, Mapping[str, str]] = CONTENT["frameworks"]
"""Framework of detectors and segmentors → family of backbones → table."""


def dense_row(framework: str, backbone: str) -> Row | None:
    """The row with the published size of a detector or segmentor; None without one."""
    rows = CONTENT["networks"].get(backbone)
    table = TABLES[framework].get(backbone.partition("_")[0])
    return ROWS.get(f"{table}, {ROWS[rows[0]].name}") if rows else None


def count_dense_cost(framework: str, backbone: str, **kwargs: Any) -> Cost:
    """Counts a forward pass of one image on the meta device, where nothing is computed.

    Counted as in the papers: 800 × 1280 px and 80 classes for detectors, 512 × 2048 px and 150 classes for segmentors;
    the convolutions and linear layers of backbone, neck and heads, 1000 regions for each box head and 100 for each
    mask head; but only the parameters of an auxiliary head. Norms are left out.

    Args:
        framework: a name of FRAMEWORKS.
        backbone: a model that timm knows.
        kwargs: arguments of the backbone.
    """
    size = DETECTION_SIZE if framework in DETECTORS else SEGMENTATION_SIZE
    network = _backbone(backbone, tuple(sorted(kwargs.items())))
    body, heads = _backbone_cost(network, size), _heads_cost(framework, network.channels, size)
    return Cost(body.parameters + heads.parameters, body.macs + heads.macs, body.macs_attention + heads.macs_attention)


@cache
def _backbone(name: str, arguments: tuple[tuple[str, Hashable], ...]) -> DenseBackbone:
    return DenseBackbone(name, device="meta", **cast(dict[str, Any], dict(arguments))).eval()


@cache
def _backbone_cost(backbone: DenseBackbone, size: tuple[int, int]) -> Cost:
    return count_pass(backbone, _image(size))


@cache
def _heads_cost(framework: str, channels: tuple[int, ...], size: tuple[int, int]) -> Cost:
    with torch.device("meta"):
        network = FRAMEWORKS[framework](_Maps(channels), 80 if framework in DETECTORS else 150).eval()
    return count_pass(_Heads(network), _image(size))


def _image(size: tuple[int, int]) -> Tensor:
    return torch.empty(1, 3, *size, device="meta")


class _Maps(DenseBackbone):
    """Replaces a backbone: returns maps of its channels and strides."""

    def __init__(self, channels: tuple[int, ...]):
        nn.Module.__init__(self)
        self.channels = channels
        self.norms = nn.ModuleList(nn.Identity() for _ in channels)

    def forward(self, x: Tensor) -> list[Tensor]:
        height, width = (side // 4 for side in x.shape[-2:])
        return [
            x.new_empty(len(x), channels, height // 2**stage, width // 2**stage)
            for stage, channels in enumerate(self.channels)
        ]


class _Heads(nn.Module):
    """The layers that the papers count, on one image and their numbers of regions."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> None:
        network: Any = self.network  # detectors have their heads in attributes that nn.Module does not declare
        if not hasattr(network, "transform"):
            network(images)
            return
        maps = list(network.backbone(images).values())
        if isinstance(network, RetinaNet):
            network.head(maps)
            return
        network.rpn.head(maps)
        for head in network.roi_heads.box_heads:
            head(images.new_empty(BOX_REGIONS, 256, 7, 7))
        for head in network.roi_heads.mask_heads:
            head(images.new_empty(MASK_REGIONS, 256, 14, 14))
