"""What is computed for each class of networks, and which of it is the result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from linvit.errors import SettingError, refuse
from linvit.models.backbone import Backbone
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.segmentors import SemanticFPN, UperNet, resized
from linvit.parallel.layers import AVERAGES, pooling
from linvit.streaming.steps import IMAGE, QUERY, Forward, Query, Step, backbone_steps, in_turn, query_step

SCORES = "scores"
NORMED = tuple(f"norms.{stage}" for stage in range(4))
LABELS = "labels"
KEPT = ("maps", SCORES)


def dense_steps(network: DenseBackbone) -> Iterator[Step]:
    """The steps up to the four maps, whose names are NORMED."""
    if not isinstance(network.body, Backbone):
        raise ValueError(
            f"The backbone is a {type(network.body).__name__}, expected a RAVLT, MAViT or CARE: choose one of these."
        )
    outputs = {}
    for step in backbone_steps(network.body):
        if step.stage is not None:
            outputs[step.stage] = step.name
        yield step
    for stage, norm in enumerate(network.norms):
        yield Step(NORMED[stage], (outputs[stage],), norm, in_turn(norm))


def semantic_fpn_steps(network: SemanticFPN, width: int) -> Iterator[Step]:
    """The steps up to the logits of each pixel of images of that width."""
    yield from dense_steps(network.backbone)
    neck, name = network.neck, ""
    for level in (3, 2, 1, 0):
        inner, outer = neck.inner_blocks[level], neck.layer_blocks[level]
        coarser = (name,) if name else ()
        name = f"neck.inner.{level}"
        yield Step(name, (NORMED[level], *coarser), inner, partial(_merged, inner, "nearest"))
        yield Step(f"neck.{level}", (name,), outer, in_turn(outer))
    ends = []
    for level, units in enumerate(network.head.levels):
        end = f"neck.{level}"
        for number, unit in enumerate(cast(nn.ModuleList, units)):
            before, end = end, f"head.{level}.{number}"
            if level:
                yield Step(end, (before,), unit, partial(_doubled, unit), scale=2, reach=1)
            else:
                yield Step(end, (before,), unit, in_turn(unit))
        ends.append(end)
    head = network.head.classifier
    yield Step(SCORES, tuple(ends), head, partial(_summed, head, width), scale=4, reach=1)


def upernet_steps(network: UperNet, width: int) -> Iterator[Step]:
    """As semantic_fpn_steps. Pyramid pooling reads the whole coarsest map at once."""
    yield from dense_steps(network.backbone)
    head, name, ends = network.head, "head.pooling", ["head.pooling"]
    yield Step(name, (NORMED[3],), head.pooling, in_turn(head.pooling), whole=True)
    for level in (2, 1, 0):
        inner, outer = head.inner[level], head.outer[level]
        before, name = name, f"head.inner.{level}"
        yield Step(name, (NORMED[level], before), inner, partial(_merged, inner, "bilinear"), reach=2)
        ends.insert(0, f"head.outer.{level}")
        yield Step(ends[0], (name,), outer, in_turn(outer))
    last = nn.ModuleList([head.fuse, head.classifier])
    yield Step(SCORES, tuple(ends), last, partial(_joined, head.fuse, head.classifier, width), scale=4, reach=9)


def _merged(inner: nn.Module, mode: str, maps: Sequence[Tensor]) -> Tensor:
    """A map and the next coarser one, if there is one, added up."""
    x: Tensor = inner(maps[0])
    align_corners = False if mode == "bilinear" else None
    for coarser in maps[1:]:
        x = x + interpolate(coarser, size=x.shape[-2:], mode=mode, align_corners=align_corners)
    return x


def _doubled(unit: nn.Module, maps: Sequence[Tensor]) -> Tensor:
    return interpolate(unit(maps[0]), scale_factor=2, mode="bilinear", align_corners=False)


def _summed(classifier: nn.Module, width: int, maps: Sequence[Tensor]) -> Tensor:
    levels = [x if level == 0 else resized(x, maps[0]) for level, x in enumerate(maps)]
    return _enlarged(classifier(sum(levels)), width)


def _joined(fuse: nn.Module, classifier: nn.Module, width: int, maps: Sequence[Tensor]) -> Tensor:
    levels = [resized(level, maps[0]) for level in maps]
    return _enlarged(classifier(fuse(torch.cat(levels, dim=1))), width)


def _enlarged(logits: Tensor, width: int) -> Tensor:
    size = (4 * logits.shape[2], width)
    return interpolate(logits, size=size, mode="bilinear", align_corners=False)


@dataclass
class Plan:
    """The steps of a network, and what of it is wanted.

    maps: the names of the maps of the result, by the keys that they have there. pooled: the name of the map whose mean
    the classifier reads, None without a classifier.
    """

    steps: list[Step]
    maps: dict[int | str, str] = field(default_factory=dict)
    pooled: str | None = None

    def strides(self) -> dict[str, int]:
        """Pixels per row of each map."""
        strides = {IMAGE: 1}
        for step in self.steps:
            strides[step.name] = strides[step.inputs[0]] * step.stride // step.scale
        return strides


def plan(network: nn.Module, shape: Sequence[int], keep: Sequence[str], query: Query | None) -> Plan:
    """What to compute for images of that shape.

    Raises ValueError, naming the layer, for a network that cannot be computed strip by strip; for `keep` and a query
    that do not fit; and for the height of images for a segmentor.
    """
    if network.training:
        raise SettingError("`network` is in training mode, expected evaluation mode: call `network.eval()` first.")
    planned = _classifier(network, keep) if isinstance(network, Backbone) else _dense(network, shape, keep)
    if query is None:
        return planned
    names = [step.name for step in planned.steps]
    blocks = ", ".join(name for name in names if ".blocks." in name and not name.endswith(".attn"))
    refuse(
        query.block not in names and f"`query` names {query.block!r}, expected one of {blocks}: choose one of them.",
        not (0 <= query.row < shape[2] and 0 <= query.column < shape[3])
        and f"`query` is at row {query.row} and column {query.column}, but the image is {shape[2]} × {shape[3]} px:"
        " choose a place inside.",
    )
    index = next(index for index, name in enumerate(names) if name in (query.block, f"{query.block}.attn"))
    step = planned.steps[index]
    planned.steps.insert(index, query_step(step, query, planned.strides()[step.inputs[0]]))
    planned.maps[QUERY] = QUERY
    return planned


def _classifier(network: Backbone, keep: Sequence[str]) -> Plan:
    planned = Plan(list(backbone_steps(network)))
    strides = planned.strides()
    if "maps" in keep:
        planned.maps = {strides[step.name]: step.name for step in planned.steps if step.stage is not None}
    last, pool = planned.steps[-1].name, pooling(network)
    if pool and pool not in AVERAGES:
        raise SettingError(
            f"The pooling of `network` is {pool!r}, expected an average: create it with global_pool='avg'."
        )
    if pool:
        planned.pooled = last
    if SCORES in keep or not pool:
        planned.maps[SCORES] = SCORES
        planned.steps.append(Step(SCORES, (last,), nn.Identity(), _at_each_position(network)))
    return planned


def _dense(network: nn.Module, shape: Sequence[int], keep: Sequence[str]) -> Plan:
    height, width = shape[2:]
    if isinstance(network, DenseBackbone):
        planned = Plan(list(dense_steps(network)))
    elif isinstance(network, SemanticFPN | UperNet):
        if height % 32:
            raise ValueError(
                f"The image is {height} px high, expected a multiple of 32 for a segmentor: add rows and remove them"
                " from the result."
            )
        steps = (
            semantic_fpn_steps(network, width) if isinstance(network, SemanticFPN) else upernet_steps(network, width)
        )
        planned = Plan(list(steps))
        planned.steps.append(Step(LABELS, (SCORES,), nn.Identity(), _labels))
        planned.maps[LABELS] = LABELS
        if SCORES in keep:
            planned.maps[SCORES] = SCORES
    else:
        raise SettingError(
            f"`network` is a {type(network).__name__}, expected a RAVLT, MAViT or CARE, a DenseBackbone, SemanticFPN or"
            " UperNet: choose one of these networks."
        )
    if "maps" in keep or isinstance(network, DenseBackbone):
        planned.maps |= {4 * 2**stage: name for stage, name in enumerate(NORMED)}
    return planned


def _at_each_position(network: Backbone) -> Forward:
    """The logits of each position of the last map, as if it were all that the classifier reads."""

    def forward(maps: Sequence[Tensor]) -> Tensor:
        batch, channels, height, width = maps[0].shape
        positions = maps[0].permute(0, 2, 3, 1).reshape(-1, channels, 1, 1)
        logits = cast(Tensor, network.forward_head(positions)).flatten(1)
        return logits.view(batch, height, width, -1).permute(0, 3, 1, 2)

    return forward


def _labels(maps: Sequence[Tensor]) -> Tensor:
    """The most probable class of each pixel, (batch, 1, height, width), 8 bits if that is enough."""
    labels = maps[0].argmax(1, keepdim=True)
    return labels.to(torch.uint8 if maps[0].shape[1] <= 256 else torch.int16)
