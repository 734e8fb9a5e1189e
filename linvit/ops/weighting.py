"""Weightings α: how much each key token counts, before any query reads it."""

from typing import NamedTuple

import torch
from torch import Tensor

WEIGHTINGS = ("uniform", "query_mean", "prefix_query_mean")


class Weights(NamedTuple):
    """Token j has the weight factor_j · exp(exponent_j), both (batch, heads, tokens); a masked token has factor 0.

    The exponent is separate because RALA's reaches 10⁴ on large activations. None stands for ones (factor) and zeros
    (exponent): uniform weights are `Weights()`.
    """

    factor: Tensor | None = None
    exponent: Tensor | None = None

    def relative(self, shift: Tensor, key: Tensor) -> Tensor:
        """factor · exp(exponent - shift) of the tokens of `key`; `shift` broadcasts against (batch, heads, tokens)."""
        if self.exponent is None:
            return torch.ones_like(key[..., 0]) if self.factor is None else self.factor
        mass = (self.visible_exponent() - shift).exp()
        return mass if self.factor is None else mass * self.factor

    def visible_exponent(self) -> Tensor:
        """The exponent; the lowest finite number where the factor is 0."""
        assert self.exponent is not None
        if self.factor is None:
            return self.exponent
        return self.exponent.masked_fill(self.factor == 0, torch.finfo(self.exponent.dtype).min)


def visible_tokens(key_mask: Tensor, key: Tensor) -> Tensor:
    """A key mask that is (batch, tokens) or broadcasts to (batch, heads, tokens), as bool of the latter shape."""
    mask = key_mask.unsqueeze(1) if key_mask.dim() == 2 else key_mask
    return mask.bool().expand(key.shape[:3])


def shown_queries(weighting: str | Tensor, query: Tensor, visible: Tensor | None) -> Tensor:
    """The queries; zeros where a mask also hides those from their mean, so that no gradient depends on them."""
    if visible is None or isinstance(weighting, Tensor) or weighting == "uniform":
        return query
    return query.masked_fill(~visible.unsqueeze(-1), 0)


def query_mean(query: Tensor, key_mask: Tensor | None) -> Tensor:
    """Mean of κ(q) (batch, heads, tokens, width) over the tokens where key_mask (batch, heads, tokens) is True."""
    if key_mask is None:
        return query.mean(-2)
    count = key_mask.sum(-1, keepdim=True).clamp_min(1)
    return query.masked_fill(~key_mask.unsqueeze(-1), 0).sum(-2) / count


def token_weights(weighting: str | Tensor, query: Tensor, key: Tensor, key_mask: Tensor | None) -> Weights:
    """Weights of tokens that every query sees, from κ(q) and κ(k); key_mask is (batch, heads, tokens).

    The tokens whose keys count are those whose queries enter the mean.
    """
    needs_mean = isinstance(weighting, str) and weighting == "query_mean"
    return weights_by_mean(weighting, query_mean(query, key_mask) if needs_mean else None, key, key_mask)


def weights_by_mean(weighting: str | Tensor, mean: Tensor | None, key: Tensor, key_mask: Tensor | None) -> Weights:
    """The same with the mean of κ(q), (batch, heads, width), where the weighting is "query_mean".

    Its softmax is RALA's (CVPR 2025, Eq. 4): of s · mean_i κ(q_i) · κ(k_j). The paper takes the mean of the raw queries
    and no scale; the released code, which we follow, takes the mean of κ(q) and s = 1/√width.
    """
    factor = None if key_mask is None else key_mask.to(key.dtype)
    if isinstance(weighting, Tensor):
        given = weighting.to(key.dtype).expand(key.shape[:-1])
        return Weights(given if factor is None else given * factor)
    if mean is None:
        return Weights(factor)
    return Weights(factor, (key @ (key.shape[-1] ** -0.5 * mean).unsqueeze(-1)).squeeze(-1))
