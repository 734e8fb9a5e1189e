"""The scores of one query over all tokens of an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.operator import Operator
from linvit.ops.bidirectional import rule_of, summarized, tokens_of
from linvit.ops.state import nonzero, read
from linvit.ranges import Amount, Checked
from linvit.streaming.steps import Forward, Step
from linvit.streaming.strip import Strip

QUERY = "query"


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
    scores: Tensor = row.squeeze(-2).unflatten(-1, grid)
    return scores


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
