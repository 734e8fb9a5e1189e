"""A network as steps from maps to the next map, each computed strip by strip, and the scores of one query."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError, refuse
from linvit.layers.attention import rotary_table
from linvit.layers.block import AttentionBlock
from linvit.layers.operator import LEARNED, Operator
from linvit.models.backbone import Backbone, Stage
from linvit.models.pyramid import PyramidStage
from linvit.ops.bidirectional import rule_of, summarized, tokens_of
from linvit.ops.state import nonzero, read
from linvit.parallel.layers import halo
from linvit.ranges import Amount, Checked
from linvit.streaming.strip import Strip

IMAGE = "image"
Forward = Callable[[Sequence[Tensor]], Tensor]
QUERY = "query"


@dataclass(frozen=True)
class Step:
    """A computation that turns some rows of maps into rows of the next map.

    name: of its output. inputs: the names of the maps that it reads. module: its layers. forward: from the rows of the
    maps to rows of the output. scale: by how much the output is finer than the first input, for layers that enlarge
    maps. reach: rows of the first input that are read beyond those of the convolutions. whole: whether it needs all
    rows at once. stage: the stage whose output it gives.
    """

    name: str
    inputs: tuple[str, ...]
    module: nn.Module
    forward: Forward
    scale: int = 1
    reach: int = 0
    whole: bool = False
    stage: int | None = None

    @property
    def convolutions(self) -> list[nn.Conv2d]:
        return [module for module in self.module.modules() if isinstance(module, nn.Conv2d)]

    @property
    def stride(self) -> int:
        """Rows of the first input for one row of the output."""
        stride = 1
        for layer in self.convolutions:
            stride *= layer.stride[0]
        return stride

    @property
    def rows_around(self) -> int:
        """How many rows above and below a row of the first input its outputs can depend on, at most."""
        reach, stride = self.reach, 1
        for layer in self.convolutions:
            reach += max(halo(layer)) * stride
            stride *= layer.stride[0]
        return reach

    def height(self, height: int) -> int:
        """The height of the output, from that of the first input."""
        for layer in self.convolutions if self.stride > 1 else ():
            span = layer.dilation[0] * (layer.kernel_size[0] - 1)
            height = (height + 2 * int(layer.padding[0]) - span - 1) // layer.stride[0] + 1
        return height * self.scale

    @property
    def channels(self) -> float:
        """Channels of all maps inside, per position of the first input: a measure of memory."""
        return sum(layer.out_channels * area for layer, area in self._areas()) * self.scale**2

    @property
    def products(self) -> float:
        """Products of the convolutions, per position of the first input: a measure of time."""
        return sum(layer.weight.numel() * area for layer, area in self._areas())

    def _areas(self) -> Iterator[tuple[nn.Conv2d, float]]:
        area = 1.0
        for layer in self.convolutions:
            area /= layer.stride[0] * layer.stride[1]
            yield layer, area


def backbone_steps(network: Backbone) -> Iterator[Step]:
    """The steps up to the map that the classifier reads.

    Raises ValueError, naming the layer, for attention that cannot be computed strip by strip.
    """
    for name, module in network.named_modules():
        if isinstance(module, Operator):
            refuse(
                module.nonlinear
                and f"The attention {name} reads its values nonlinearly, which cannot be computed strip by strip:"
                " choose a RAVLT, MAViT or CARE.",
                module.options is None
                and f"The attention {name} is softmax attention, which needs all tokens at once: choose a network with"
                " linear attention in all stages, such as `mavit_tiny_linear` or one with `pattern='LLLL'`.",
                module.mean_query is not None
                and f"The attention {name} has the weighting {LEARNED!r}, which cannot be computed strip by strip:"
                " choose 'uniform' or 'query_mean'.",
                module.blocks is not None
                and f"The attention {name} has blocks, which need the whole map at once: choose a network without.",
            )
    name = "stem"
    yield Step(name, (IMAGE,), network.stem, in_turn(*network.stem.children()))
    for number, module in enumerate(network.stages):
        stage = cast(Stage, module)
        if not isinstance(stage.downsample, nn.Identity):
            before, name = name, f"stages.{number}.downsample"
            yield Step(name, (before,), stage.downsample, in_turn(stage.downsample))
        for index, block in enumerate(stage.blocks):
            before, name = name, f"stages.{number}.blocks.{index}"
            steps = list(_halves(name, before, stage, block))
            yield from steps[:-1]
            yield replace(steps[-1], stage=number if index == len(stage.blocks) - 1 else None)
    if not isinstance(network.final_conv, nn.Identity):
        yield Step("final_conv", (name,), network.final_conv, in_turn(network.final_conv))


def in_turn(*layers: nn.Module) -> Forward:
    """Layers one after the other."""

    def forward(maps: Sequence[Tensor]) -> Tensor:
        (x,) = maps
        for layer in layers:
            x = layer(x)
        return x

    return forward


def _halves(name: str, before: str, stage: Stage, block: nn.Module) -> Iterator[Step]:
    """Two steps for a block of a pyramid: fewer rows around a strip are computed for nothing than in one."""
    if not isinstance(stage, PyramidStage):
        yield Step(name, (before,), block, in_turn(block))
        return
    if not isinstance(block, AttentionBlock):
        raise ValueError(
            f"The block {name} is a {type(block).__name__}, expected an AttentionBlock: stream the network as it was"
            " before `linvit.fuse`."
        )
    attended = f"{name}.attn"
    first = nn.ModuleList(layer for layer in (block.cpe, block.norm1, block.attn) if layer is not None)
    yield Step(attended, (before,), first, partial(_attended, stage, block))
    second = nn.ModuleList(layer for name, layer in block.named_children() if name in ("cpe2", "norm2", "ffn"))
    yield Step(name, (attended,), second, lambda maps: block.with_feed_forward(*maps))


def _attended(stage: PyramidStage, block: AttentionBlock, maps: Sequence[Tensor]) -> Tensor:
    (x,) = maps
    strip = cast(Strip, block.attn.operator.shard)
    rotary: Any = rotary_table(x, stage.head_width, strip.rows.first) if stage.rope else None
    return block.with_attention(x, rotary)


@dataclass(frozen=True)
class Query(Checked):
    """A token whose scores are wanted: the path of the block, such as "stages.2.blocks.0", and its place in pixels."""

    block: str
    row: Amount
    column: Amount


class Reached(Exception):  # noqa: N818 - not an error: query, key, value and rotation of the operator
    """Ends the computation of a block at its operator."""

    def __init__(self, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.inputs = inputs


def query_step(step: Step, query: Query, stride: int) -> Step:
    """The step to the scores of a query in a block, (batch, heads, height, width), instead of the block's output.

    stride: pixels per row of the block's map. Raises ValueError for a block without attention.
    """
    operators = [module for module in step.module.modules() if isinstance(module, Operator)]
    if len(operators) != 1:
        raise SettingError(
            f"`query` names {query.block}, which has no attention: choose a block with linear attention."
        )
    place = (query.row // stride, query.column // stride)
    return Step(QUERY, step.inputs, step.module, partial(_scores, operators[0], step.forward, place))


def _scores(operator: Operator, block: Forward, place: tuple[int, int], maps: Sequence[Tensor]) -> Tensor:
    """What the query reads if each token's value is a row of the identity: how much of that token is in its output."""
    (query, key, value, *rotary), strip = _inputs(operator, block, maps), cast(Strip, operator.shard)
    axes = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide", "eps": 1e-6, **operator.axes(key)}
    rule = rule_of(**axes, dtype=query.dtype, shard=strip)
    tokens = tokens_of(query, key, value, None, rotary[0] if rotary else None, rule)
    (q, rq, k, rk, _), weights, state = summarized(tokens, rule)
    grid = maps[0].shape[-2:]
    q, rq = strip.chosen(torch.stack((q, rq)), place, grid[1])
    alpha = weights.relative(state.shift.unsqueeze(-1), k) / nonzero(state.n).unsqueeze(-1)
    deviation = alpha.unsqueeze(-1) * (rk - state.r.unsqueeze(-2))
    row = read(state._replace(S=deviation.mT, u=alpha), q, rq, rule.normalizer, rule.eps)
    return row.squeeze(-2).unflatten(-1, grid)


def _inputs(operator: Operator, block: Forward, maps: Sequence[Tensor]) -> tuple[Any, ...]:
    def reach(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        raise Reached(inputs)

    handle = operator.register_forward_pre_hook(reach)
    try:
        block(maps)
    except Reached as reached:
        return reached.inputs
    finally:
        handle.remove()
    raise AssertionError("the block did not call its operator")
