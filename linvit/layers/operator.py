"""The attention operator of a layer: the chosen mechanism, with learned axes where they are asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from timm.layers import use_fused_attn
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from linvit.layers.cache import AttentionCache, KeyValues
from linvit.layers.checks import Device, Dtype, Heads, Width, multiple_of_heads
from linvit.ops import Rotary, State, attention_scores, linear_attention
from linvit.ops.feature_map import query_and_key_map
from linvit.ops.normalizer import resolve_normalizer
from linvit.ops.position import rotate
from linvit.ops.state import Shard
from linvit.ranges import Checked, OneOf, known

if TYPE_CHECKING:
    from linvit.layers.mechanisms import Mechanism

LEARNED = "learned"
PLACES = ("maps", "sequences", "images")
BIDIRECTIONAL = ("uniform", "query_mean")


@dataclass(frozen=True)
class Operands:
    """The inputs of one attention operator, and what is computed from them.

    query, key, value: (batch, heads, tokens, width), before feature map and rotation.
    options: of `linear_attention`; None for softmax attention.
    rotary: rotation of queries and keys.
    read_share, value_share: the output is read_share × what a token reads + value_share × its own value.
    causal: the queries are the last tokens; each sees itself and the tokens before it.
    key_mask: True where a token counts, (batch, tokens).
    cu_seqlens: sequences that are packed, as in `linear_attention`; for linear attention only.
    bias: added to the logits of softmax attention, (batch, heads, queries, tokens).
    cache: the tokens read before these. Linear attention adds these tokens to it; with softmax they are in it already.
    x, gate, grid, num_prefix, packing: for the steps after the operator: the input of the layer, the input of its gate,
        and the places of the tokens: num_prefix tokens, then a grid (height, width); or the Packing of documents; or
        ImagePatches.
    shard: these tokens are only some of all, see `linvit.ops.state`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any] | None
    rotary: Rotary | None = None
    read_share: float = 1.0
    value_share: float = 0.0
    causal: bool = False
    key_mask: Tensor | None = None
    cu_seqlens: Tensor | None = None
    bias: Tensor | None = None
    cache: AttentionCache | None = None
    x: Tensor | None = None
    gate: Tensor | None = None
    grid: tuple[int, int] = (0, 0)
    num_prefix: int = 0
    packing: Any = None
    shard: Shard | None = None

    def output(self, fused: bool = True) -> Tensor:
        """(batch, heads, queries, width): scores @ value, without forming the matrix if `fused` or linear."""
        if self.options is not None:
            read = self._linear_output("auto" if fused else "torch")
        elif self.shard is not None:
            raise ValueError(
                "the network has softmax attention, which needs all tokens at once: choose one with linear attention in"
                " all stages or blocks, such as `pattern='LLLL'`"
            )
        elif fused:
            whole = self.causal and self.bias is None and self.query.shape[-2] == self.key.shape[-2]
            bias = None if whole else self._bias()
            read = scaled_dot_product_attention(*self.rotated(), self.value, attn_mask=bias, is_causal=whole)
        else:
            read = self.product()
        return read if self.value_share == 0 else self.read_share * read + self.value_share * self.value

    def product(self) -> Tensor:
        """scores @ value, without the shares."""
        scores = self._scores()
        return (scores @ self.value.to(scores.dtype)).to(self.value.dtype)

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, queries, tokens)."""
        scores = self._scores()
        if self.value_share == 0:
            return scores
        identity = torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)
        return self.read_share * scores + self.value_share * identity

    def rotated(self) -> tuple[Tensor, Tensor]:
        """Query and key, rotated if there is a rotation."""
        if self.rotary is None:
            return self.query, self.key
        return rotate(self.query, self.rotary), rotate(self.key, self.rotary)

    def _linear_output(self, backend: str) -> Tensor:
        tokens, options = (self.query, self.key, self.value), self._linear_options()
        read: Tensor
        if self.cache is None:
            read = linear_attention(*tokens, backend=backend, shard=self.shard, **options)
            return read
        state = State.empty(self.query, self.value) if self.cache.read is None else self.cache.read
        assert isinstance(state, State)
        read, self.cache.read = linear_attention(*tokens, backend=backend, state=state, **options)
        return read

    def _linear_options(self) -> dict[str, Any]:
        names = ("rotary", "key_mask", "causal", "cu_seqlens")
        return {**{name: getattr(self, name) for name in names}, **(self.options or {})}

    def _scores(self) -> Tensor:
        if self.options is not None:
            return attention_scores(self.query, self.key, **self._linear_options())
        query, key = self.rotated()
        logits: Tensor = query * query.shape[-1] ** -0.5 @ key.mT
        bias = self._bias()
        return (logits if bias is None else logits + bias).softmax(-1)

    def _bias(self) -> Tensor | None:
        """The bias, with -∞ at the keys that softmax attention must not see."""
        bias, (queries, keys) = self.bias, (self.query.shape[-2], self.key.shape[-2])
        if self.causal and queries > 1:
            later = torch.ones(queries, keys, dtype=torch.bool, device=self.key.device).triu(1 + keys - queries)
            bias = (self.query.new_zeros(queries, keys) if bias is None else bias).masked_fill(later, -torch.inf)
        if self.key_mask is not None:
            bias = self.query.new_zeros(1, 1, 1, keys) if bias is None else bias
            bias = bias.masked_fill(~self.key_mask[:, None, None, :], -torch.inf)
        return bias


class Operator(Checked, nn.Module):
    """The attention operator of a layer: the chosen mechanism, with learned axes where they are asked for.

    Args:
        mechanism: a name in MECHANISMS.
        heads, head_width: number of heads and channels per head.
        feature_map: replaces that of the mechanism.
        weighting: replaces that of the mechanism; "learned" uses a learned vector per head in place of the mean query.
        normalizer: replaces that of the mechanism; "learned" reads β·s·num·v - γ·u with β (initially 1) and γ
            (initially 0) learned per head.
        causal: each token sees only itself and the tokens before it.
        place: where the attention is used: "maps", "sequences" or "images"; None allows every mechanism.

    Learned axes are vectors, so timm and our recipes apply no weight decay to them.

    Raises ValueError for an unknown mechanism or axis value, and for axis values with softmax.
    """

    def __init__(
        self,
        mechanism: str,
        heads: Heads,
        head_width: Width,
        feature_map: str | tuple[str, str] | None = None,
        weighting: str | None = None,
        normalizer: str | None = None,
        causal: bool = False,
        place: Annotated[str, OneOf(PLACES)] | None = None,
        device: Device = None,
        dtype: Dtype = None,
    ) -> None:
        super().__init__()
        given = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
        changes = {axis: value for axis, value in given.items() if value is not None}
        axes = known_mechanism(mechanism, place).axes_of(causal)
        if axes is None and changes:
            raise ValueError(f"`mechanism` {mechanism!r} accepts no {', '.join(changes)}: choose a linear one")
        _check_axes(changes)
        self.mechanism, self.heads, self.head_width = mechanism, heads, head_width
        self.causal, self.place = causal, place
        self.fused = use_fused_attn()
        self.shard: Shard | None = None  # set while the network reads only some of the tokens
        self.options = None if axes is None else {**axes, **changes}
        self.mean_query: nn.Parameter | None = None
        self.beta: nn.Parameter | None = None
        self.gamma: nn.Parameter | None = None
        if changes.get("weighting") == LEARNED:
            self.mean_query = nn.Parameter(torch.empty(heads * head_width, device=device, dtype=dtype))
        if changes.get("normalizer") == LEARNED:
            self.beta = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
            self.gamma = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initial values: uniform weights, β = 1, γ = 0."""
        for parameter, value in ((self.mean_query, 0.0), (self.beta, 1.0), (self.gamma, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def operands(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: Rotary | None = None,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        cache: AttentionCache | None = None,
        **others: Any,
    ) -> Operands:
        """The operands of tokens (batch, heads, tokens, width).

        feature_map: used instead of the axis value. cache: the tokens read before these, for causal attention; softmax
        attention appends these tokens at once. others: further fields of Operands.
        """
        if self.options is None:
            if self.mechanism == "softmax_unit_query":
                query = normalize(query, dim=-1) * query.shape[-1] ** 0.5
            if cache is not None:
                query, key = Operands(query, key, value, None, rotary).rotated()
                rotary, held = None, cache.read or KeyValues()
                assert isinstance(held, KeyValues)
                cache.read = held
                key, value = held.append(key, value)
            return Operands(
                query, key, value, None, rotary, causal=self.causal, cache=cache, shard=self.shard, **others
            )
        options = dict(self.options) if feature_map is None else {**self.options, "feature_map": feature_map}
        if self.mean_query is not None:
            options["weighting"] = self._learned_weights(self.mean_query, key, options)
        if self.beta is not None:
            options["normalizer"] = self._learned_normalizer
        return Operands(query, key, value, options, rotary, causal=self.causal, cache=cache, shard=self.shard, **others)

    def _learned_weights(self, mean_query: Tensor, key: Tensor, options: Mapping[str, Any]) -> Tensor:
        _, key_map = query_and_key_map(options.get("feature_map", "elu1"), every_token_counts=True)
        query = mean_query.unflatten(0, (self.heads, 1, -1))
        out: Tensor = (key_map(key) * query * key.shape[-1] ** -0.5).sum(-1).softmax(-1)
        return out

    def _learned_normalizer(
        self, num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert self.beta is not None
        assert self.gamma is not None
        beta, gamma = (x.unflatten(0, (self.heads, 1, 1)) for x in (self.beta, self.gamma))
        gain = (scale * beta).expand_as(den)
        return gain, gain * num - gamma

    def forward(self, operands: Operands) -> Tensor:
        """The output for every query, (batch, heads, queries, width)."""
        return operands.output(self.fused)

    def as_map(self, y: Tensor, grid: tuple[int, int]) -> Tensor:
        """(batch, heads, tokens, width) as a map (batch, heads × width, height, width), channels last in memory."""
        return y.transpose(1, 2).reshape(y.shape[0], *grid, -1).permute(0, 3, 1, 2)


class AttentionSteps(Checked, nn.Module):
    """Attention as steps, proj(gated(with_local(operator(operands(x))))); subclasses override those that differ.

    The forward pass and the analysis share these steps. `arranged` changes the output of the operator to the layout of
    the subclass.

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mechanism: a name in MECHANISMS, such as "rala", "mala", "linear" or "softmax".
        operator_size: heads and channels per head of the operator, if they differ from those of the layer.
        options: see Operator.

    Raises ValueError for an unknown mechanism, one that cannot be used in that place, and heads that do not divide
    width.
    """

    def __init__(
        self,
        width: Width,
        heads: Heads,
        mechanism: str,
        operator_size: tuple[Heads, Width] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        head_width = multiple_of_heads(width, heads)
        self.heads = heads
        self.operator = Operator(mechanism, *(operator_size or (heads, head_width)), **options)

    def arranged(self, mixed: Tensor, operands: Operands) -> Tensor:
        """The output of the operator, (batch, heads, tokens, width), in the layout of the next steps; the same here."""
        return mixed

    def with_local(self, y: Tensor, operands: Operands) -> Tensor:
        """y plus the local term, if there is one."""
        return y

    def gated(self, y: Tensor, operands: Operands) -> Tensor:
        """y times φ of the operands' gate, if the class has `modulate`."""
        modulate: nn.Module | None = getattr(self, "modulate", None)
        return y if modulate is None else y * modulate(operands.gate)

    def by_head(self, y: Tensor) -> Tensor:
        """A tensor in the layout of these steps as (batch, heads, tokens, width)."""
        return y

    def attended(self, operands: Operands) -> Tensor:
        """The input of the output projection."""
        y = self.arranged(self.operator(operands), operands)
        return self.gated(self.with_local(y, operands), operands)


class MapSteps(AttentionSteps):
    """Steps on maps (batch, heads × width, height, width)."""

    def arranged(self, mixed: Tensor, operands: Operands) -> Tensor:
        return self.operator.as_map(mixed, operands.grid)

    def by_head(self, y: Tensor) -> Tensor:
        return y.reshape(y.shape[0], self.heads, y.shape[1] // self.heads, -1).mT


class SequenceSteps(AttentionSteps):
    """Steps on sequences (batch, tokens, heads × width)."""

    def arranged(self, mixed: Tensor, operands: Operands) -> Tensor:
        return merged(mixed)

    def by_head(self, y: Tensor) -> Tensor:
        y = y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return y


def merged(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width) to (batch, tokens, heads × width)."""
    return x.transpose(1, 2).flatten(2)


def known_mechanism(name: str, place: str | None = None) -> "Mechanism":
    """The row of that mechanism.

    Raises ValueError if there is none, or it cannot be used in that place; the message lists those that can.
    """
    from linvit.layers import mechanisms  # its table names classes that contain operators

    return known("mechanism", name, mechanisms.MECHANISMS if place is None else mechanisms.at(place))


def _check_axes(changes: Mapping[str, Any]) -> None:
    """Refuses unknown names when the network is created, not when it reads its first image."""
    if "feature_map" in changes:
        query_and_key_map(changes["feature_map"], every_token_counts=True)
    if changes.get("normalizer", LEARNED) != LEARNED:
        resolve_normalizer(changes["normalizer"])
    if "weighting" in changes:
        known("weighting", changes["weighting"], dict.fromkeys((*BIDIRECTIONAL, LEARNED)))
