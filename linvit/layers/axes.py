"""What an attention computes between its tokens: the axis values of a mechanism, some of them learned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers import register_notrace_module, use_fused_attn
from torch import Tensor, nn
from torch.nn.functional import normalize, scaled_dot_product_attention

from linvit.layers.scripted import CalledBack, call_with_maps
from linvit.ops import PRESETS, Rotary, attention_scores, linear_attention
from linvit.ops.feature_map import query_and_key_map
from linvit.ops.normalizer import resolve_normalizer
from linvit.ops.position import rotate

SOFTMAX = ("softmax", "softmax_unit_query")
MECHANISMS = (
    *SOFTMAX,
    "linear",
    "linear_relu",
    "linear_exp",
    "efficient",
    "inline",
    "rala",
    "mala",
    "rala_mala",
)
LEARNED = "learned"
BIDIRECTIONAL = ("uniform", "query_mean")


def known_mechanism(name: str) -> str:
    """The name itself if it is in the table of mechanisms.

    Raises:
        ValueError: if it is not; the message lists the known ones.
    """
    if name not in MECHANISMS:
        raise ValueError(f"mechanism is {name!r}, expected one of {', '.join(sorted(MECHANISMS))}: choose a known one")
    return name


@dataclass(frozen=True)
class Operands:
    """What enters one attention, and what follows from it.

    query, key, value: (batch, heads, tokens, width), before feature map and rotation.
    options: of `linear_attention`; None for softmax attention.
    rotary: rotation of queries and keys.
    share, own: the output is share × what a token reads + own × its own value (linear angular attention).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    options: Mapping[str, Any] | None
    rotary: Rotary | None = None
    share: float = 1.0
    own: float = 0.0

    def output(self, fused: bool = True) -> Tensor:
        """(batch, heads, tokens, width): scores @ value without the matrix, where `fused` or linear."""
        if self.options is None:
            read = self._softmax_output(fused)
        else:
            backend = "auto" if fused else "torch"
            read = linear_attention(
                self.query, self.key, self.value, rotary=self.rotary, backend=backend, **self.options
            )
        return read if self.own == 0 else self.share * read + self.own * self.value

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, tokens, tokens)."""
        if self.options is None:
            scores = self._softmax_scores()
        else:
            scores = attention_scores(self.query, self.key, rotary=self.rotary, **self.options)
        if self.own == 0:
            return scores
        return self.share * scores + self.own * torch.eye(scores.shape[-1], dtype=scores.dtype, device=scores.device)

    def _rotated(self) -> tuple[Tensor, Tensor]:
        if self.rotary is None:
            return self.query, self.key
        return rotate(self.query, self.rotary), rotate(self.key, self.rotary)

    def _softmax_output(self, fused: bool) -> Tensor:
        if fused:
            return scaled_dot_product_attention(*self._rotated(), self.value)
        return self._softmax_scores() @ self.value

    def _softmax_scores(self) -> Tensor:
        query, key = self._rotated()
        return (query * query.shape[-1] ** -0.5 @ key.mT).softmax(-1)


@register_notrace_module
class Axes(CalledBack):
    """The axis values of one attention, with the parameters of those that are learned; one opaque step for tracers.

    Args:
        mechanism: "softmax", "softmax_unit_query" (queries of norm √width: softmax attention that cannot see their
            magnitude, MALA's Table 1), or a name in PRESETS.
        heads, head_width: heads and their width.
        feature_map: other than the mechanism's own.
        weighting: other than the mechanism's own; "learned" puts a learned vector a head in place of the mean query.
        normalizer: other than the mechanism's own; "learned" reads β·s·num·v - γ·u with a learned β (at first 1) and γ
            (at first 0) a head.

    What is learned is kept as vectors, which timm and so our recipes do not decay.

    Raises:
        ValueError: for softmax with other axis values, and for an unknown one.
    """

    fused: torch.jit.Final[bool]

    def __init__(
        self,
        mechanism: str,
        heads: int,
        head_width: int,
        feature_map: str | tuple[str, str] | None = None,
        weighting: str | None = None,
        normalizer: str | None = None,
        device=None,
        dtype=None,
    ):
        super().__init__()
        given = {"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}
        changes = {axis: value for axis, value in given.items() if value is not None}
        if mechanism in SOFTMAX and changes:
            raise ValueError(f"mechanism {mechanism!r} takes no {', '.join(changes)}: choose a linear one")
        _check_axes(changes)
        self.mechanism = mechanism
        self.heads = heads
        self.fused = use_fused_attn()
        self.options = None if mechanism in SOFTMAX else {**PRESETS[mechanism], **changes}
        self.mean_query = self.beta = self.gamma = None
        if changes.get("weighting") == LEARNED:
            self.mean_query = nn.Parameter(torch.empty(heads * head_width, device=device, dtype=dtype))
        if changes.get("normalizer") == LEARNED:
            self.beta = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
            self.gamma = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform weights; β = 1, γ = 0."""
        for parameter, value in ((self.mean_query, 0.0), (self.beta, 1.0), (self.gamma, 0.0)):
            if parameter is not None:
                nn.init.constant_(parameter, value)

    def operands(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None, feature_map: Callable | None = None
    ) -> Operands:
        """Operands of tokens (batch, heads, tokens, width); a feature map given here goes before the axis value."""
        if self.options is None:
            if self.mechanism == "softmax_unit_query":
                query = normalize(query, dim=-1) * query.shape[-1] ** 0.5
            return Operands(query, key, value, None, rotary)
        options = dict(self.options) if feature_map is None else {**self.options, "feature_map": feature_map}
        if self.mean_query is not None:
            options["weighting"] = self._learned_weights(key, options)
        if self.beta is not None:
            options["normalizer"] = self._learned_normalizer
        return Operands(query, key, value, options, rotary)

    def _learned_weights(self, key: Tensor, options: Mapping[str, Any]) -> Tensor:
        _, key_map = query_and_key_map(options.get("feature_map", "elu1"), every_token_counts=True)
        query = self.mean_query.unflatten(0, (self.heads, 1, -1))
        return (key_map(key) * query * key.shape[-1] ** -0.5).sum(-1).softmax(-1)

    def _learned_normalizer(
        self, num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float
    ) -> tuple[Tensor, Tensor]:
        beta, gamma = (x.unflatten(0, (self.heads, 1, 1)) for x in (self.beta, self.gamma))
        gain = (scale * beta).expand_as(den)
        return gain, gain * num - gamma

    def forward(self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Mix the positions of a map.

        Args:
            query, key, value: maps (batch, heads × width, height, width) of any strides, read without a copy.
            cos, sin: rotary table of the grid, each (height × width, head width / 2), or None for no positions.

        Returns:
            A map like value, channels last in memory.
        """
        if torch.jit.is_scripting():
            return call_with_maps(self.number, query, key, value, cos, sin)
        return self.mixed_map(query, key, value, cos, sin)

    def mixed_map(self, query: Tensor, key: Tensor, value: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """What forward returns."""
        batch, channels, height, width = value.shape
        rotary = None if cos is None else Rotary(cos, sin)
        tokens = (x.reshape(batch, self.heads, x.shape[1] // self.heads, -1).mT for x in (query, key, value))
        mixed = self.operands(*tokens, rotary).output(self.fused)
        return mixed.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


def _check_axes(changes: Mapping[str, Any]) -> None:
    """Unknown names are refused when the network is made, not when it first sees an image."""
    if "feature_map" in changes:
        query_and_key_map(changes["feature_map"], every_token_counts=True)
    if changes.get("normalizer", LEARNED) != LEARNED:
        resolve_normalizer(changes["normalizer"])
    if changes.get("weighting", LEARNED) not in (*BIDIRECTIONAL, LEARNED):
        known = ", ".join((*BIDIRECTIONAL, LEARNED))
        raise ValueError(f"weighting is {changes['weighting']!r}, expected one of {known}: choose a known one")
