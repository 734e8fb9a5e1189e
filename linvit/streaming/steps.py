"""A network as steps from one map to the next, each of which can be computed strip by strip."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from linvit.layers.attention import rotary_table
from linvit.layers.operator import LEARNED, Operator
from linvit.models.backbone import Backbone, Stage
from linvit.models.care import CARE
from linvit.models.pyramid import PyramidStage


@dataclass(frozen=True)
class Step:
    """A part of a network that turns one map into the next.

    name: the path of its module. module: its layers. forward: from rows of a map, and the number of their first row, to
    rows of the next map. stage: the stage whose output it gives, None for other steps.
    """

    name: str
    module: nn.Module
    forward: Callable[[Tensor, int], Tensor]
    stage: int | None = None

    @property
    def convolutions(self) -> list[nn.Conv2d]:
        return [module for module in self.module.modules() if isinstance(module, nn.Conv2d)]

    @property
    def stride(self) -> int:
        """Rows of the input for one row of the output."""
        stride = 1
        for layer in self.convolutions:
            stride *= layer.stride[0]
        return stride

    @property
    def reach(self) -> int:
        """How many rows above and below an input row its outputs can depend on, at most."""
        reach, stride = 0, 1
        for layer in self.convolutions:
            span, padding = _span_and_padding(layer)
            reach += max(padding, span - padding) * stride
            stride *= layer.stride[0]
        return reach

    def height(self, height: int) -> int:
        """The height of the output."""
        for layer in self.convolutions if self.stride > 1 else ():
            span, padding = _span_and_padding(layer)
            height = (height + 2 * padding - span - 1) // layer.stride[0] + 1
        return height

    @property
    def channels(self) -> float:
        """Channels of all maps inside, relative to the input's positions: a measure of memory per position."""
        channels, area = 0.0, 1.0
        for layer in self.convolutions:
            area /= layer.stride[0] * layer.stride[1]
            channels += layer.out_channels * area
        return channels


def steps_of(network: nn.Module) -> list[Step]:
    """The steps of a network up to its classifier.

    Raises ValueError, naming the layer, for a network that cannot be computed strip by strip.
    """
    if not isinstance(network, Backbone):
        raise ValueError(
            f"`network` is a {type(network).__name__}, expected a RAVLT, MAViT or CARE: choose one of these networks."
        )
    if network.training:
        raise ValueError("`network` is in training mode, expected evaluation mode: call `network.eval()` first.")
    for name, module in network.named_modules():
        if isinstance(module, Operator):
            _check_operator(name, module)
    return list(_steps(network))


def averages(network: Backbone) -> bool:
    """Whether the classifier reads the mean of the last map."""
    if isinstance(network, CARE):
        return network.global_pool == "avg"
    return bool(cast(Any, network).head.global_pool.pool_type == "avg")


def _check_operator(name: str, operator: Operator) -> None:
    if operator.options is None:
        raise ValueError(
            f"The attention {name} is softmax attention, which needs all tokens at once: choose a network with linear"
            " attention in all stages, such as `mavit_tiny_linear` or one with `pattern='LLLL'`."
        )
    if operator.mean_query is not None:
        raise ValueError(
            f"The attention {name} has the weighting {LEARNED!r}, which cannot be computed strip by strip: choose"
            " 'uniform' or 'query_mean'."
        )


def _steps(network: Backbone) -> Iterator[Step]:
    yield Step("stem", network.stem, partial(_in_turn, list(network.stem.children())))
    for number, module in enumerate(network.stages):
        stage = cast(Stage, module)
        if not isinstance(stage.downsample, nn.Identity):
            yield Step(f"stages.{number}.downsample", stage.downsample, partial(_in_turn, [stage.downsample]))
        for index, block in enumerate(stage.blocks):
            last = number if index == len(stage.blocks) - 1 else None
            yield Step(f"stages.{number}.blocks.{index}", block, partial(_block, stage, block), last)
    if not isinstance(network.final_conv, nn.Identity):
        yield Step("final_conv", network.final_conv, partial(_in_turn, [network.final_conv]))


def _span_and_padding(layer: nn.Conv2d) -> tuple[int, int]:
    """How many rows lie between the first and the last that an output reads, and how many of zeros are above."""
    return (layer.kernel_size[0] - 1) * layer.dilation[0], int(layer.padding[0])


def _in_turn(layers: list[nn.Module], x: Tensor, first_row: int) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def _block(stage: Stage, block: nn.Module, x: Tensor, first_row: int) -> Tensor:
    if not isinstance(stage, PyramidStage):
        return cast(Tensor, block(x))
    rotary = rotary_table(x, stage.head_width, first_row) if stage.rope else None
    return cast(Tensor, block(x, rotary))
