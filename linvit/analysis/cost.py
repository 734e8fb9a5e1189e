"""The cost of a network: parameters, and multiply-accumulates with and without the attention products.

That of a detector or segmentor is counted as in the papers' tables.
"""

import copy
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from linvit.arguments import check_dense, check_network
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import DETECTORS, FRAMEWORKS
from linvit.models.dense.retinanet import RetinaNet
from linvit.ranges import Count, check, lookup

DETECTION_SIZE = (800, 1280)
SEGMENTATION_SIZE = (512, 2048)
BOX_REGIONS, MASK_REGIONS = 1000, 100
LAYERS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


@dataclass(frozen=True)
class Cost:
    """Counts for one image.

    macs: multiply-accumulates (MACs) of convolutions and linear layers, as in the papers' tables. macs_attention: MACs
    of the products between tensors inside the attention, in addition to these; the tables leave them out.
    """

    parameters: int
    macs: int
    macs_attention: int


def count_cost(network: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Counts one forward pass of a copy whose weights are zeros, on the CPU, for one image.

    The network itself may be on any device, meta included, and is not changed. input_size: (channels, height, width).
    """
    check_network("network", network)
    check({"input_size": tuple[Count, Count, Count]}, {"input_size": input_size})
    return count_batch(network, torch.zeros(1, *input_size, dtype=next(network.parameters()).dtype))


def count_batch(network: nn.Module, *inputs: Tensor) -> Cost:
    """As count_cost, for inputs on the CPU."""
    _check(network, inputs)
    twin = copy.deepcopy(network).to("meta").to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
    return count_pass(twin, *inputs)


def count_pass(network: nn.Module, *inputs: Tensor) -> Cost:
    """Counts one forward pass of the network itself, in its current mode, on any device."""
    _check(network, inputs)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network(*inputs)
    root = type(network).__name__
    layers = {
        f"{root}.{name}" if name else root for name, module in network.named_modules() if isinstance(module, LAYERS)
    }
    in_layers = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name in layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(parameters, in_layers // 2, (counter.get_total_flops() - in_layers) // 2)


def _check(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    check_network("network", network)
    for index, x in enumerate(inputs):
        check_dense(f"inputs[{index}]", x)


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
    check({"framework": str, "backbone": str}, {"framework": framework, "backbone": backbone})
    lookup("framework", framework, FRAMEWORKS)
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
