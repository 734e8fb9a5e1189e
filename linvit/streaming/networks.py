"""What is computed for each class of networks, and which of it is the result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.models.backbone import Backbone
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.segmentors import SemanticFPN, UperNet
from linvit.parallel.layers import AVERAGES, pooling
from linvit.streaming.dense import NORMED, SCORES, dense_steps, semantic_fpn_steps, upernet_steps
from linvit.streaming.query import QUERY, Query, query_step
from linvit.streaming.steps import IMAGE, Forward, Step, backbone_steps

LABELS = "labels"
KEPT = ("maps", SCORES)


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
    if query.block not in names:
        blocks = ", ".join(name for name in names if ".blocks." in name and not name.endswith(".attn"))
        raise SettingError(f"`query` names {query.block!r}, expected one of {blocks}: choose one of them.")
    if not (0 <= query.row < shape[2] and 0 <= query.column < shape[3]):
        raise SettingError(
            f"`query` is at row {query.row} and column {query.column}, but the image is {shape[2]} × {shape[3]} px:"
            " choose a place inside."
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
