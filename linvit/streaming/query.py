"""The scores of one query over all tokens of an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.layers.operator import Operands, Operator
from linvit.ops.bidirectional import Rule, Tokens, summarized
from linvit.ops.feature_map import query_and_key_map
from linvit.ops.normalizer import resolve_normalizer
from linvit.ops.state import accumulator_dtype, nonzero, read, visible_in
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


class Reached(Exception):  # noqa: N818 - not an error: the operands of the operator
    """Ends the computation of a block at its operator."""

    def __init__(self, operands: Operands) -> None:
        super().__init__()
        self.operands = operands


def query_step(step: Step, query: Query, stride: int) -> Step:
    """The step to the scores of a query in a block, (batch, heads, height, width), instead of the block's output.

    stride: pixels per row of the block's map. Raises ValueError for a block without attention.
    """
    operators = [module for module in step.module.modules() if isinstance(module, Operator)]
    if len(operators) != 1:
        raise ValueError(f"`query` names {query.block}, which has no attention: choose a block with linear attention.")
    place = (query.row // stride, query.column // stride)
    return Step(QUERY, step.inputs, step.module, partial(_scores, operators[0], step.forward, place))


def _scores(operator: Operator, block: Forward, place: tuple[int, int], maps: Sequence[Tensor]) -> Tensor:
    """What the query reads if each token's value is a row of the identity: how much of that token is in its output."""
    operands, strip = _operands(operator, block, maps), cast(Strip, operator.shard)
    options: dict[str, Any] = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide"}
    options |= operands.options or {}
    maps_of = query_and_key_map(options["feature_map"], every_token_counts=False)
    normalizer, eps = resolve_normalizer(options["normalizer"]), options.get("eps", 1e-6)
    rule = Rule(*maps_of, options["weighting"], normalizer, eps, accumulator_dtype(operands.query.dtype), strip)
    visible = visible_in(strip, operands.key, None)
    tokens = Tokens(operands.query, operands.key, operands.value, visible, operands.rotary)
    (q, rq, k, rk, _), weights, state = summarized(tokens, rule)
    q, rq = strip.chosen(torch.stack((q, rq)), place, operands.grid[1])
    alpha = weights.relative(state.shift.unsqueeze(-1), k) / nonzero(state.n).unsqueeze(-1)
    deviation = alpha.unsqueeze(-1) * (rk - state.r.unsqueeze(-2))
    row = read(state._replace(S=deviation.mT, u=alpha), q, rq, normalizer, eps)
    scores: Tensor = row.squeeze(-2).unflatten(-1, operands.grid)
    return scores


def _operands(operator: Operator, block: Forward, maps: Sequence[Tensor]) -> Operands:
    def reach(_: nn.Module, inputs: tuple[Operands]) -> None:
        raise Reached(inputs[0])

    handle = operator.register_forward_pre_hook(reach)
    try:
        block(maps)
    except Reached as reached:
        return reached.operands
    finally:
        handle.remove()
    raise AssertionError("the block did not call its operator")
