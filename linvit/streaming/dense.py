"""The steps of backbones with four maps, and of segmentors."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from linvit.models.backbone import Backbone
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.segmentors import SemanticFPN, UperNet, resized
from linvit.streaming.steps import Step, backbone_steps, in_turn

SCORES = "scores"
NORMED = tuple(f"norms.{stage}" for stage in range(4))


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
