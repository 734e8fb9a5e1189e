"""The scores of one query over all tokens of an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from linvit.layers.operator import Operands, Operator
from linvit.ops.bidirectional import Rule, Tokens, mapped
from linvit.ops.feature_map import query_and_key_map
from linvit.ops.normalizer import resolve_normalizer
from linvit.ops.shard import count, visible_in, whole_mean, whole_state
from linvit.ops.state import accumulator_dtype, nonzero, summarize
from linvit.ops.weighting import query_mean, weights_by_mean
from linvit.streaming.steps import Forward, Step
from linvit.streaming.strip import Strip

QUERY = "query"


@dataclass(frozen=True)
class Query:
    """A token whose scores are wanted: the path of the block, such as "stages.2.blocks.0", and its place in pixels."""

    block: str
    row: int
    column: int


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

    def forward(maps: Sequence[Tensor], first_row: int) -> Tensor:
        return _scores(operators[0], step.forward, maps, first_row, place)

    return Step(QUERY, step.inputs, step.module, forward)


def _scores(
    operator: Operator, block: Forward, maps: Sequence[Tensor], first_row: int, place: tuple[int, int]
) -> Tensor:
    """A_ij = α_j (gain_i (num_ij - num_i) + level_i), see linvit.ops.normalizer; i is the query."""
    operands, strip = _operands(operator, block, maps, first_row), cast(Strip, operator.shard)
    options: dict[str, Any] = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide"}
    options |= operands.options or {}
    maps_of = query_and_key_map(options["feature_map"], every_token_counts=False)
    normalizer, eps = resolve_normalizer(options["normalizer"]), options.get("eps", 1e-6)
    rule = Rule(*maps_of, options["weighting"], normalizer, eps, accumulator_dtype(operands.query.dtype))
    tokens = Tokens(operands.query, operands.key, operands.value, None, operands.rotary)
    q, rq, k, rk, v = mapped(tokens, rule)
    visible = visible_in(strip, k, None)
    mean = None
    if rule.weighting == "query_mean":
        mean = whole_mean(strip, query_mean(q, visible), count(q, visible))
    weights = weights_by_mean(rule.weighting, mean, k, visible)
    state = whole_state(strip, summarize(k, rk, v, weights))
    chosen = strip.chosen(torch.stack((q, rq)), first_row, place, operands.grid[1])
    q, rq = chosen.unbind()
    num, den = ((x * y).sum(-1, keepdim=True).unsqueeze(-1) for x, y in ((rq, state.r), (q, state.z)))
    mass = (state.n * state.shift.exp())[..., None, None]
    gain, level = normalizer(num, den, mass, q.shape[-1] ** -0.5, eps)
    each = (rk @ rq.unsqueeze(-1)).mT
    factor = (
        torch.ones_like(k[..., 0]) if weights.exponent is None else (weights.exponent - state.shift[..., None]).exp()
    )
    alpha = (factor / nonzero(state.n).unsqueeze(-1)).unsqueeze(-2)
    scores: Tensor = (alpha * (gain * (each - num) + level)).squeeze(-2).unflatten(-1, operands.grid)
    return scores


def _operands(operator: Operator, block: Forward, maps: Sequence[Tensor], first_row: int) -> Operands:
    def reach(_: nn.Module, inputs: tuple[Operands]) -> None:
        raise Reached(inputs[0])

    handle = operator.register_forward_pre_hook(reach)
    try:
        block(maps, first_row)
    except Reached as reached:
        return reached.operands
    finally:
        handle.remove()
    raise AssertionError("the block did not call its operator")
