"""Attention by blocks on the GPU kernels: tokens packed block by block, whose states torch mixes between the kernels.

`Mixture` is `mixed` of linvit/ops/state.py and its gradient, on rows as the kernels write them.
"""

from typing import Any

import torch
from torch import Tensor

from linvit.kernels import launch
from linvit.kernels.operator import PARAMETERS, QUERY_KEY_VALUE, operator


class Mixture:
    """What each block reads of the states of all blocks of its image.

    Args:
        states: rows of all images, blocks and heads.
        mixing: (heads, blocks, blocks).
        width, value_width: of a head.

    Attributes:
        mixed: the same, of what each block reads.
        grad_mixing: the gradient of `mixing`, after a backward pass.
    """

    def __init__(self, states: Tensor, mixing: Tensor, width: int, value_width: int) -> None:
        self.states, self.shape = states, (-1, mixing.shape[-1], mixing.shape[0], states.shape[-1])
        self.sizes = [width * value_width, width, value_width, width, 1]
        S, z, u, r, n = self._fields(states)
        mass = mixing * n.mT
        total = mass.sum(-1, keepdim=True)
        self.relative = n.mT / total.masked_fill(total == 0, 1)
        self.share = mixing * self.relative
        self.centre = u.mean(-2, keepdim=True)
        self.r, self.apart = r, u - self.centre
        self.rows = torch.cat(((S + _outer(r, self.apart)), z, r, self.apart), dim=-1)
        uncentred, z, self.mixed_r, self.mixed_apart = self._parts(self.share @ self.rows)
        fields = (
            uncentred - _outer(self.mixed_r, self.mixed_apart),
            z,
            self.centre + self.mixed_apart,
            self.mixed_r,
            total,
        )
        self.mixed = self._joined(fields)

    def backward(self, grads: Tensor) -> Tensor:
        """The gradients of `states` from those of `mixed`, rows of the same form."""
        S, z, u, r, _ = self._fields(grads)
        square = S.unflatten(-1, (self.sizes[1], self.sizes[2]))
        r = r - (square @ self.mixed_apart.unsqueeze(-1)).squeeze(-1)
        apart = u - (self.mixed_r.unsqueeze(-2) @ square).squeeze(-2)
        given = torch.cat((S, z, r, apart), dim=-1)
        by_share = given @ self.rows.mT
        by_share = by_share - (self.share * by_share).sum(-1, keepdim=True)
        self.grad_mixing = (self.relative * by_share).sum(0)
        S, z, r, apart = self._parts(self.share.mT @ given)
        square = S.unflatten(-1, (self.sizes[1], self.sizes[2]))
        r = r + (square @ self.apart.unsqueeze(-1)).squeeze(-1)
        u = apart + (self.r.unsqueeze(-2) @ square).squeeze(-2)
        return self._joined((S, z, u, r, torch.zeros_like(r[..., :1])))

    def _fields(self, rows: Tensor) -> tuple[Tensor, ...]:
        """S, z, u, r and n, (images, heads, blocks, numbers)."""
        whole = rows.view(self.shape).transpose(1, 2)
        return whole[..., : sum(self.sizes)].split(self.sizes, dim=-1)

    def _parts(self, rows: Tensor) -> tuple[Tensor, ...]:
        square, width, value_width, *_ = self.sizes
        return rows.split([square, width, width, value_width], dim=-1)

    def _joined(self, fields: tuple[Tensor, ...]) -> Tensor:
        """Rows as kernels read them, whose shift is 0."""
        rows = torch.zeros_like(self.states)
        rows.view(self.shape)[..., : sum(self.sizes)] = torch.cat(fields, dim=-1).transpose(1, 2)
        return rows


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)


SEEN = f"Tensor? cos, Tensor? sin, Tensor? visible, Tensor cu_seqlens, Tensor mixing, {PARAMETERS}"
RULE = "str query_map, str key_map, str normalizer, float eps"


@operator("attend_blocks", f"{QUERY_KEY_VALUE}, {SEEN}, {RULE}", 2)
def attend_blocks(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Output of tokens packed block by block, of all images, and the states of the blocks.

    mixing: (heads, blocks, blocks), float32. cu_seqlens: the first token of every block of every image.
    """
    inputs, options, mixing = _call(query, key, value, *rest)
    call, scale = launch.Call(inputs, options), query.shape[-1] ** -0.5
    out = launch.room(query, value)
    with torch.cuda.device_of(query):
        states = launch.summaries(call, inputs, launch.strided_mask(inputs.visible), None, scale)
        mixture = Mixture(states, mixing, query.shape[-1], value.shape[-1])
        launch.read_with(call, query, out, mixture.mixed, inputs.cu_seqlens, scale, options.eps)
    return out, states


def _call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    visible: Tensor | None,
    cu_seqlens: Tensor,
    mixing: Tensor,
    *rest: Any,
) -> tuple[launch.Inputs, launch.Options, Tensor]:
    *parameters, query_map, key_map, normalizer, eps = rest
    inputs = launch.Inputs(query, key, value, (cos, sin), visible, None, cu_seqlens, tuple(parameters))
    return inputs, launch.Options(query_map, key_map, False, normalizer, eps), mixing


@attend_blocks.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    size = launch.state_size(query.shape[-1], value.shape[-1])
    heads = (rest[3].shape[0] - 1) * query.shape[1]
    return launch.room(query, value), query.new_empty((heads, size), dtype=torch.float32)


@operator("attend_blocks_backward", f"Tensor grad, {QUERY_KEY_VALUE}, {SEEN}, Tensor states, {RULE}", 7)
def attend_blocks_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, mixing, and of the parameters, empty where there are none."""
    seen, states, rule = rest[:8], rest[8], rest[9:]
    inputs, options, mixing = _call(query, key, value, *seen, *rule)
    mixture = Mixture(states, mixing, query.shape[-1], value.shape[-1])
    into = tuple(torch.empty_like(x) for x in (query, key, value))
    with torch.cuda.device_of(grad):
        *_, parameters = launch.backward(grad, inputs, mixture.mixed, None, options, into, mixture=mixture)
    return *into, *(states.new_empty(0) if x is None else x for x in (mixture.grad_mixing, *parameters))


@attend_blocks_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    given = rest[4:8]
    return *(torch.empty_like(x) for x in (query, key, value)), *(
        rest[8].new_empty(0 if x is None else x.shape) for x in given
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:11], output[1])
    ctx.rule = inputs[11:]


def _gradients(ctx: Any, grad: Tensor | None, unused: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 15
    *given, of_mixing, a, b, c = attend_blocks_backward(grad, *ctx.saved_tensors, *ctx.rule)
    needs = ctx.needs_input_grad[7:11]
    of_seen = (x if need else None for x, need in zip((of_mixing, a, b, c), needs, strict=True))
    return *given, None, None, None, None, *of_seen, *(None,) * 4


attend_blocks.register_autograd(_gradients, setup_context=_save)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: tuple[Tensor, Tensor, Tensor],
    tables: tuple[Tensor | None, Tensor | None],
    key_mask: Tensor | None,
    *rest: Any,
) -> Tensor:
    """The output of bidirectional attention by blocks, (batch, heads, tokens, value width), heads inside tokens.

    Args:
        query, key, value: (batch, heads, tokens, width).
        blocks: the tokens block by block, where blocks begin among them, and the mixing.
        tables: cosines and sines of a rotation.
        key_mask: True where a token counts, (batch, heads, tokens).
        rest: parameters of formulas and the rule, as in `attend_blocks`.
    """
    order, cuts, mixing = blocks
    batch, heads, tokens, _ = query.shape

    def packed(x: Tensor) -> Tensor:
        by_block = x.transpose(1, 2).index_select(1, order)
        return by_block.flatten(0, 1).unsqueeze(0).transpose(1, 2)

    cos, sin = (None if table is None else table.index_select(0, order).repeat(batch, 1) for table in tables)
    visible = None if key_mask is None else packed(key_mask.unsqueeze(-1)).squeeze(-1)
    first = tokens * torch.arange(batch, device=order.device).unsqueeze(1)
    bounds = torch.cat(((first + cuts[:-1]).flatten(), cuts[-1:] * batch))
    matrix = mixing.float().expand(heads, -1, -1)
    out, _ = attend_blocks(*(packed(x) for x in (query, key, value)), cos, sin, visible, bounds, matrix, *rest)
    by_block = out.transpose(1, 2).unflatten(1, (batch, tokens)).squeeze(0)
    return torch.empty_like(by_block).index_copy(1, order, by_block).transpose(1, 2)
