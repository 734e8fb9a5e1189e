"""The attention operator of a layer: the chosen mechanism, with learned axes if they are asked for, and its cache."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from timm.layers import use_fused_attn
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from linvit.errors import SettingError, refuse
from linvit.formulas import warn_of_lost_parameters
from linvit.formulas.feature_map import FeatureMap, query_and_key_map
from linvit.formulas.normalizer import Normalizer, resolve_normalizer
from linvit.layers.cache import AttentionCache, KeyValues
from linvit.layers.checks import TensorOptions, multiple_of_heads
from linvit.layers.mechanisms import mechanism_of
from linvit.ops import Rotary, State, attention_scores, linear_attention, linear_attention_step
from linvit.ops.backend import softmax_kernel_for
from linvit.ops.mixing import initial_mixing, resized_mixing
from linvit.ops.position import rotate
from linvit.ops.state import Shard, Weighting
from linvit.ranges import lookup

LEARNED = "learned"
NO_SCORES = (
    "the attention reads its values nonlinearly, so it has no matrix of scores and no KV state: choose layers with"
    " another mechanism, or analyze ranks"
)
BIDIRECTIONAL = ("uniform", "query_mean")


class Operator(nn.Module):
    """The attention operator of a layer: the chosen mechanism, with learned axes where they are asked for.

    Args:
        mechanism: a name in MECHANISMS.
        heads, head_width: number of heads and channels per head.
        feature_map: replaces that of the mechanism; names or functions, as for all three in `linear_attention`.
        weighting: replaces that of the mechanism; "learned" uses a learned vector per head in place of the mean query.
        normalizer: replaces that of the mechanism; "learned" reads β·s·num·v - γ·u with β (initially 1) and γ
            (initially 0) learned per head. Any of the three functions may be an nn.Module: each layer gets its own copy
            and owns the copy's parameters.
        causal: each token sees only itself and the tokens before it.
        place: where the attention is used: "maps", "sequences" or "images"; None allows every mechanism.
        blocks: (rows, columns) of blocks of tokens, each of which weighs the others by a row of the learned matrix
            `mixing`, as in MHLA (ICLR 2026); None for no blocks.
        block_sides: (height, width) of a block in tokens, if grids of other sizes are to have more or fewer blocks
            than `blocks`, with an interpolated matrix; None if all grids have as many, which keeps the cost linear.
        prefix: whether there are tokens before the grid, which are a block of their own.

    Learned axes are vectors, so timm and our recipes apply no weight decay to them.

    Attributes:
        nonlinear: of the class, whether the read is nonlinear, see Mechanism.
        shares: the output is shares[0] × what a token reads + shares[1] × its own value.
        shard: these tokens are only some of all, see `linvit.ops.state.Shard`; set while a network reads only some.
        fused: use kernels; otherwise plain torch, and softmax attention through its scores.
    """

    nonlinear = False

    def __init__(
        self,
        mechanism: str,
        heads: int,
        head_width: int,
        feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap] | None = None,
        weighting: str | Weighting | None = None,
        normalizer: str | Normalizer | None = None,
        causal: bool = False,
        place: str | None = None,
        blocks: tuple[int, int] | None = None,
        block_sides: tuple[int, int] | None = None,
        prefix: bool = False,
        **dd: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        replacing = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
        changes: dict[str, Any] = {axis: value for axis, value in replacing.items() if value is not None}
        entry = mechanism_of(mechanism, place)
        axes = entry.axes_of(causal)
        refuse(
            entry.nonlinear != self.nonlinear
            and f"`mechanism` is {mechanism!r}, which this layer cannot compute: choose its own mechanism",
            axes is None
            and changes
            and f"`mechanism` {mechanism!r} accepts no {', '.join(changes)}: choose a linear one",
            (axes is None or causal or place == "sequences")
            and blocks is not None
            and f"`mechanism` {mechanism!r} accepts no blocks here: choose a linear one, for images",
            blocks is None
            and block_sides is not None
            and "`block_sides` is given without `blocks`: add the number of blocks on the grid of training",
        )
        # unknown names are refused when the network is created, not when it reads its first image
        if "feature_map" in changes:
            query_and_key_map(changes["feature_map"], every_token_counts=True)
        if changes.get("normalizer", LEARNED) != LEARNED:
            resolve_normalizer(changes["normalizer"])
        if "weighting" in changes and not callable(changes["weighting"]):
            lookup("weighting", changes["weighting"], dict.fromkeys((*BIDIRECTIONAL, LEARNED)))
        self.mechanism, self.heads, self.head_width = mechanism, heads, head_width
        self.causal, self.place = causal, place
        self.fused = use_fused_attn()
        self.shares = (1.0, 0.0)
        self.shard: Shard | None = None
        self.functions: nn.ModuleList | None = None  # modules in the options
        self.options = None if axes is None else self._with_copies({**axes, **changes}, dd)
        self.mean_query: nn.Parameter | None = None
        self.beta: nn.Parameter | None = None
        self.gamma: nn.Parameter | None = None
        self.blocks, self.block_sides, self.prefix = blocks and (blocks[0], blocks[1]), block_sides, prefix
        self.mixing: nn.Parameter | None = None
        if blocks is not None:
            number = blocks[0] * blocks[1] + prefix
            self.mixing = nn.Parameter(torch.empty(number, number, **dd))
        if changes.get("weighting") == LEARNED:
            self.mean_query = nn.Parameter(torch.empty(heads * head_width, **dd))
        if changes.get("normalizer") == LEARNED:
            self.beta = nn.Parameter(torch.empty(heads, **dd))
            self.gamma = nn.Parameter(torch.empty(heads, **dd))
        self.reset_parameters()

    def _with_copies(self, options: dict[str, Any], dd: TensorOptions) -> dict[str, Any]:
        """The options with copies of their modules, which become modules of this one."""
        copies: dict[nn.Module, nn.Module] = {}

        def copy_module(axis: str, value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(copy_module(axis, each) for each in value)
            if not isinstance(value, nn.Module):
                warn_of_lost_parameters(axis, value)
                return value
            return copies.setdefault(value, deepcopy(value).to(**dd))

        options = {axis: copy_module(axis, value) for axis, value in options.items()}
        if copies:
            self.functions = nn.ModuleList(copies.values())
        return options

    def reset_parameters(self) -> None:
        """Initial values: uniform weights, β = 1, γ = 0, and blocks that weigh near ones more."""
        for parameter, value in ((self.mean_query, 0.0), (self.beta, 1.0), (self.gamma, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)
        if self.blocks is not None:
            with torch.no_grad():
                cast(nn.Parameter, self.mixing).copy_(initial_mixing(self.blocks, self.prefix))

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: Rotary | None = None,
        *,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        bias: Tensor | None = None,
        cache: AttentionCache | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """The output for every query, (batch, heads, queries, width).

        Args:
            query, key, value: (batch, heads, tokens, width), before feature map and rotation.
            rotary: rotation of queries and keys.
            feature_map: used instead of the axis value.
            key_mask: True where a token counts, (batch, tokens).
            cu_seqlens: sequences that are packed, as in `linear_attention`; for linear attention only.
            bias: added to the logits of softmax attention, (batch, heads, queries, keys).
            cache: the tokens read before these, for causal attention; these are added to it.
            grid: height and width in tokens, for blocks.
        """
        if self.options is None:
            read = self._softmax(query, key, value, rotary, key_mask, bias, cache)
        elif cache is None:
            read = linear_attention(
                query,
                key,
                value,
                rotary=rotary,
                key_mask=key_mask,
                causal=self.causal,
                cu_seqlens=cu_seqlens,
                shard=self.shard,
                backend="auto" if self.fused else "torch",
                **self.axes(key, feature_map, grid),
            )
        else:
            state, axes = cast(State | None, cache.read), self.axes(key, feature_map)
            read, cache.read = linear_attention_step(query, key, value, state, rotary=rotary, key_mask=key_mask, **axes)
        read_share, value_share = self.shares
        return read if value_share == 0 else read_share * read + value_share * value

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None = None,
        rotary: Rotary | None = None,
        *,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        key_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        bias: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, queries, keys); arguments as of forward."""
        if self.options is None:
            query, key = rotated(self.scaled(query), key, rotary)
            scores = softmax_scores(query, key, self._bias(query, key, key_mask, bias))
        else:
            where: dict[str, Any] = {"rotary": rotary, "key_mask": key_mask, "cu_seqlens": cu_seqlens}
            scores = attention_scores(query, key, causal=self.causal, **where, **self.axes(key, feature_map, grid))
        return shared_out(scores, self.shares)

    def axes(
        self,
        key: Tensor,
        feature_map: Callable[[Tensor], Tensor] | None = None,
        grid: tuple[int, int] | None = None,
    ) -> dict[str, Any]:
        """The options of `linear_attention` for these keys, with the learned ones; feature_map, grid: as in forward."""
        axes = dict(self.options or {})
        if feature_map is not None:
            axes["feature_map"] = feature_map
        if self.mean_query is not None:
            _, key_map = query_and_key_map(axes.get("feature_map", "elu1"), every_token_counts=True)
            mean = self.mean_query.unflatten(0, (self.heads, 1, -1))
            axes["weighting"] = (key_map(key) * mean * key.shape[-1] ** -0.5).sum(-1).softmax(-1)
        if self.beta is not None:
            axes["normalizer"] = self._learned_normalizer
        if self.mixing is not None:
            if grid is None:
                raise SettingError("the operator has blocks, but its layer gives no `grid` of the tokens: pass it")
            axes |= {"mixing": self._mixing_of(grid), "blocks": self._blocks_of(grid), "grid": grid}
        return axes

    def _blocks_of(self, grid: tuple[int, int]) -> tuple[int, int]:
        """The number of blocks on a grid."""
        assert self.blocks is not None
        if self.block_sides is None:
            return self.blocks
        rows, columns = (max(1, round(length / side)) for length, side in zip(grid, self.block_sides, strict=True))
        return rows, columns

    def _mixing_of(self, grid: tuple[int, int]) -> Tensor:
        """The matrix with entries from 0 to 1; the gradient is that without these limits.

        MHLA's code limits the parameter itself after each step of the optimizer.
        """
        assert self.mixing is not None
        assert self.blocks is not None
        limited: Tensor = self.mixing + (self.mixing.clamp(0, 1) - self.mixing).detach()
        blocks = self._blocks_of(grid)
        return limited if blocks == self.blocks else resized_mixing(limited, self.blocks, blocks)

    def scaled(self, query: Tensor) -> Tensor:
        """The queries of softmax attention; those of unit queries all have the norm √width."""
        unit = self.mechanism == "softmax_unit_query"
        return normalize(query, dim=-1) * query.shape[-1] ** 0.5 if unit else query

    def as_map(self, y: Tensor, grid: tuple[int, int]) -> Tensor:
        """(batch, heads, tokens, width) as a map (batch, heads × width, height, width), channels last in memory."""
        return y.transpose(1, 2).reshape(y.shape[0], *grid, -1).permute(0, 3, 1, 2)

    def _softmax(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: Rotary | None,
        key_mask: Tensor | None,
        bias: Tensor | None,
        cache: AttentionCache | None,
    ) -> Tensor:
        if self.shard is not None:
            raise SettingError(
                "the network has softmax attention, which needs all tokens at once: choose one with linear attention in"
                " all stages or blocks, such as `pattern='LLLL'`"
            )
        query = self.scaled(query)
        if self.fused and not self.causal and bias is None and cache is None:
            kernel = softmax_kernel_for(query, key, value, rotary)
            if kernel is not None:
                return kernel(query, key, value, rotary=rotary, key_mask=key_mask)
        query, key = rotated(query, key, rotary)
        if cache is not None:
            cache.read = cache.read or KeyValues()
            key, value = cast(KeyValues, cache.read).append(key, value)
        if not self.fused:
            scores = softmax_scores(query, key, self._bias(query, key, key_mask, bias))
            return (scores @ value.to(scores.dtype)).to(value.dtype)
        whole = self.causal and bias is None and key_mask is None and query.shape[-2] == key.shape[-2]
        bias = None if whole else self._bias(query, key, key_mask, bias)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, is_causal=whole)

    def _bias(self, query: Tensor, key: Tensor, key_mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
        """The bias, with -∞ at the keys that softmax attention must not see."""
        queries, keys = query.shape[-2], key.shape[-2]
        if self.causal and queries > 1:
            later = torch.ones(queries, keys, dtype=torch.bool, device=key.device).triu(1 + keys - queries)
            bias = (query.new_zeros(queries, keys) if bias is None else bias).masked_fill(later, -torch.inf)
        if key_mask is not None:
            bias = query.new_zeros(1, 1, 1, keys) if bias is None else bias
            bias = bias.masked_fill(~key_mask[:, None, None, :], -torch.inf)
        return bias

    def _learned_normalizer(
        self, num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert self.beta is not None
        assert self.gamma is not None
        beta, gamma = (x.unflatten(0, (self.heads, 1, 1)) for x in (self.beta, self.gamma))
        gain = (scale * beta).expand_as(den)
        return gain, gain * num - gamma


class AttentionLayer(nn.Module):
    """The base of all attention layers: `heads`, and the `operator` of the mechanism.

    A subclass projects its input in `forward`, calls the operator and projects its output; between the two may be a
    local term and a gate, the methods `with_local` and `gated`, whose results the analysis records.

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mechanism: a name in MECHANISMS, such as "rala", "mala", "linear" or "softmax".
        operator_size: heads and channels per head of the operator, if they differ from those of the layer.
        options: see Operator.
    """

    operator_class: type[Operator] = Operator

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        operator_size: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        head_width = multiple_of_heads(width, heads)
        self.heads = heads
        self.operator = self.operator_class(mechanism, *(operator_size or (heads, head_width)), **options)


@dataclass(frozen=True)
class Lesson:
    """One attention of a student and what it has to learn from the softmax attention that it replaces.

    layer: the path in the student of the module that the block calls. attention: the path of its AttentionLayer, which
    is the same except in SAM and Hiera. present: what the teacher's attention computes from the arguments of that call.
    scoring: the teacher's attention as AttentionLayer, if its scores are to be learned.
    """

    layer: str
    attention: str
    present: Callable[..., Tensor]
    scoring: AttentionLayer | None = None


def merged(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width) to (batch, tokens, heads × width)."""
    return x.transpose(1, 2).flatten(2)


def in_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, heads × width) to (batch, heads, tokens, width), the opposite of `merged`."""
    by_head: Tensor = x.unflatten(-1, (heads, -1))
    return by_head.transpose(1, 2)


def rotated(query: Tensor, key: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor]:
    """Query and key, rotated if there is a rotation."""
    return (query, key) if rotary is None else (rotate(query, rotary), rotate(key, rotary))


def softmax_scores(query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """The scores of softmax attention, (batch, heads, queries, keys), of rotated queries and keys."""
    logits: Tensor = query * query.shape[-1] ** -0.5 @ key.mT
    return (logits if bias is None else logits + bias).softmax(-1)


def shared_out(scores: Tensor, shares: tuple[float, float]) -> Tensor:
    """The scores with the shares of an operator: shares[0] of them, and shares[1] of each token itself."""
    read_share, value_share = shares
    if value_share == 0:
        return scores
    return read_share * scores + value_share * torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)
