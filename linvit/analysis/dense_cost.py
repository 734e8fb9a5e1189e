"""What a detector or segmentor costs, counted as the papers' tables count."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from linvit.analysis.cost import Cost
from linvit.models.frameworks import DETECTORS, FRAMEWORKS, build_dense
from linvit.models.retinanet import RetinaNet

DETECTION_SIZE = (800, 1280)
SEGMENTATION_SIZE = (512, 2048)
BOX_REGIONS, MASK_REGIONS = 1000, 100


def dense_size(framework: str) -> tuple[int, int]:
    """Height and width of the image for which the papers count."""
    return DETECTION_SIZE if framework in DETECTORS else SEGMENTATION_SIZE


def count_dense_cost(framework: str, backbone: str, num_classes: int | None = None, **kwargs) -> Cost:
    """Counts one image of dense_size on the meta device, where nothing is computed.

    As the papers count: the layers of backbone, neck and heads, 1000 regions for every box head and 100 for every mask
    head, nothing of an auxiliary head but its parameters; normalizations are left out.

    Args:
        framework: a name of FRAMEWORKS.
        backbone: a model that timm knows.
        num_classes: 80 for detectors, 150 for segmentors by default.
        kwargs: arguments of the backbone.
    """
    classes = num_classes or (80 if framework in DETECTORS else 150)
    network = build_dense(framework, backbone, classes, device="meta", **kwargs)
    return count_network(network, framework)


def count_network(network: nn.Module, framework: str) -> Cost:
    """count_dense_cost for a network that is there already; it is moved to the meta device."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"framework is {framework!r}, expected one of {', '.join(FRAMEWORKS)}: choose one of them")
    counted = _Counted(network.to("meta").eval())
    height, width = dense_size(framework)
    counter = FlopCounterMode(display=False, depth=None)
    with torch.no_grad(), counter:
        counted(torch.empty(1, 3, height, width, device="meta"))
    kinds = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)
    layers = {f"_Counted.{name}" for name, module in counted.named_modules() if isinstance(module, kinds)}
    in_layers = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name in layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(parameters, in_layers // 2, (counter.get_total_flops() - in_layers) // 2)


class _Counted(nn.Module):
    """The layers that the papers count, on an image and on as many regions as they take."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> None:
        network = self.network
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
