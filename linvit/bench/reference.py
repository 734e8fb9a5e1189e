"""The order of operations of the released code, in code of our own: the baseline of all our speeds.

Feature map, weights times N on the keys, mean, rotation as x·cos + turned(x)·sin, two products, read-out, each step a
tensor of its own in the dtype of the inputs.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers import Operator
from linvit.layers.convolutions import PointwiseConv
from linvit.layers.mechanisms import MECHANISMS
from linvit.layers.patches import Stem
from linvit.ops import Rotary

EPS = 1e-6


class Tables(NamedTuple):
    """Cosines and sines of the angles, each (tokens, width): each angle appears twice, as released."""

    cos: Tensor
    sin: Tensor


def wide_tables(rotary: Rotary) -> Tables:
    """The released form of a table (tokens, width / 2)."""
    return Tables(*(table.repeat_interleave(2, dim=-1) for table in rotary))


def rotate(x: Tensor, tables: Tables | None) -> Tensor:
    """Turn the channel pairs of x (…, tokens, width) as released: x·cos + turned(x)·sin."""
    if tables is None:
        return x
    turned = torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    return x * tables.cos + turned * tables.sin


def linear(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tables: Tables | None = None,
    feature_map: Callable[[Tensor], Tensor] = lambda x: F.elu(x) + 1,
) -> Tensor:
    """Vanilla linear attention as CARE and MLLA release it; (batch, heads, tokens, width), as all of this module."""
    return _divided(feature_map(query), feature_map(key), value, tables)


def rala(query: Tensor, key: Tensor, value: Tensor, tables: Tables | None = None) -> Tensor:
    """RALA (CVPR 2025) as released: weights times N on the keys."""
    tokens, scale = key.shape[-2], key.shape[-1] ** -0.5
    q, k = F.elu(query) + 1, F.elu(key) + 1
    weights = (scale * q.mean(-2, keepdim=True) @ k.mT).softmax(-1).mT
    return _divided(q, k * weights * tokens, value, tables)


def mala(query: Tensor, key: Tensor, value: Tensor, tables: Tables | None = None) -> Tensor:
    """MALA (ICCV 2025) as released: similarity times 1/(N·√width)."""
    tokens, scale = key.shape[-2], key.shape[-1] ** -0.5
    q, k = F.elu(query) + 1, F.elu(key) + 1
    den = q @ k.mean(-2, keepdim=True).mT * scale
    root = (scale / tokens) ** 0.5
    state = (rotate(k, tables).mT * root) @ (value * root)
    return rotate(q, tables) @ state * (1 + 1 / (den + EPS)) - den * value.mean(-2, keepdim=True)


def efficient(query: Tensor, key: Tensor, value: Tensor, tables: Tables | None = None) -> Tensor:
    """Efficient attention (WACV 2021): softmax of the queries over channels, of the keys over tokens."""
    return rotate(query.softmax(-1), tables) @ (rotate(key.softmax(-2), tables).mT @ value)


def softmax(query: Tensor, key: Tensor, value: Tensor, tables: Tables | None = None) -> Tensor:
    """Softmax attention through its explicit matrix, as the released RAVLT and MAViT compute it."""
    scores: Tensor = (query.shape[-1] ** -0.5 * rotate(query, tables)) @ rotate(key, tables).mT
    return scores.softmax(-1).matmul(value)


def _divided(q: Tensor, k: Tensor, value: Tensor, tables: Tables | None) -> Tensor:
    root = k.shape[-2] ** -0.5
    inverse = 1 / (q @ k.mean(-2, keepdim=True).mT + EPS)
    state = (rotate(k, tables).mT * root) @ (value * root)
    return rotate(q, tables).matmul(state).mul(inverse)


REFERENCES: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "linear_relu": partial(linear, feature_map=F.relu),
    "linear_exp": partial(linear, feature_map=torch.exp),
    "efficient": efficient,
    "rala": rala,
    "mala": mala,
    "softmax": softmax,
}


class ReferenceOperator(Operator):
    """An operator that follows the released order and layout: maps with their channels first in memory."""

    shared: dict[str, tuple[Tensor, Tables]]

    def forward(  # type: ignore[override]
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None = None, **unused: None
    ) -> Tensor:
        tables = None if rotary is None else self._tables(rotary)
        return REFERENCES[self.mechanism](query, key, value, tables)

    def as_map(self, y: Tensor, grid: tuple[int, int]) -> Tensor:
        return y.mT.reshape(y.shape[0], -1, *grid)

    def _tables(self, rotary: Rotary) -> Tables:
        """The wide tables, made once a stage as released: blocks of one stage are handed the same cosines."""
        if "last" not in self.shared or self.shared["last"][0] is not rotary.cos:
            self.shared["last"] = rotary.cos, wide_tables(rotary)
        return self.shared["last"][1]


def reference_model(model: nn.Module) -> nn.Module:
    """A copy of a model in which every attention follows the released order, and 1×1 convolutions are torch's own, on
    maps in the memory format of the images.

    Parameters and outputs are the same.
    """
    model = deepcopy(model)
    operators = [module for module in model.modules() if isinstance(module, Operator)]
    if not operators:
        raise SettingError(
            f"{type(model).__name__} has no attention of ours, so it has no released order: "
            "expected one of `linvit models`, leave the variant `reference` out"
        )
    for module in model.modules():
        if isinstance(module, PointwiseConv):
            cast(nn.Module, module).__class__ = nn.Conv2d
        elif isinstance(module, Stem):
            cast(nn.Module, module).__class__ = nn.Sequential  # which keeps the memory format
    shared: dict[str, tuple[Tensor, Tables]] = {}
    for operator in operators:
        if operator.mechanism not in REFERENCES or operator.options != MECHANISMS[operator.mechanism].axes:
            raise SettingError(
                f"the released order of {operator.mechanism!r} with {dict(operator.options or {})} is not implemented, "
                f"expected {', '.join(REFERENCES)} with its own axes: leave the variant `reference` out"
            )
        cast(nn.Module, operator).__class__ = ReferenceOperator
        cast(ReferenceOperator, operator).shared = shared
    return model
