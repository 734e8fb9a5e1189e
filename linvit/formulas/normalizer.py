"""Normalizers: the rules that scale the output of a query.

With c = Σ_j α_j (Rκ(q)·Rκ(k_j)) (v_j - u), the covariance that a query reads, and u = Σ_j α_j v_j, the mean value,
every normalizer computes

    out = gain · c + level · u

where gain and level are functions of three numbers per query: num = Σ_j α_j Rκ(q)·Rκ(k_j) and
den = Σ_j α_j κ(q)·κ(k_j), equal unless a rotation is used, and mass, the total weight before it was set to one (the
number of tokens for uniform weights). In this form no two large numbers are subtracted. The level is also the sum of
the query's row of the score matrix.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from linvit.arguments import check_dense, kind

Normalizer = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def divide(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Divide by the sum of the row (vanilla linear attention, RALA, CARE): out = num·v / (den + eps).

    Rows sum to one without rotation. The query's magnitude cancels.
    """
    gain = 1 / (den + eps)
    return gain, num * gain


def magnitude(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Keep the query's magnitude: out = s·num·v·(1 + 1/(s·den + eps)) - s·den·u.

    Source: MALA (ICCV 2025). The paper's similarity is φ(q)·φ(k); the released code, which we follow, multiplies it by
    s/N with s = 1/√width, and adds eps = 1e-6. Rows sum to one without rotation.
    """
    share = scale / (scale * den + eps)
    return scale + share, scale * (num - den) + share * num


def magnitude_no_beta(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """MALA without its factor β: out = s·num·v - s·den·u. Rows sum to zero without rotation (MALA, Table 11)."""
    return torch.full_like(den, scale), scale * (num - den)


def magnitude_no_gamma(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """MALA without its offset γ: out = s·num·v·(1 + 1/(s·den + eps)). Rows sum to 1 + s·den (MALA, Table 11)."""
    gain = scale + scale / (scale * den + eps)
    return gain, gain * num


def subtract(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Subtract the mean instead of dividing: out = s·num·v + (1 - s·den)·u.

    Source: InLine attention (NeurIPS 2024). Rows sum to one without rotation; no division.
    """
    return torch.full_like(den, scale), scale * (num - den) + 1


def none(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """out = num·v, a mean over the tokens: for feature maps that need no normalizer."""
    return torch.ones_like(den), num


def total(num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """out = mass·num·v, the plain sum over the tokens (Hydra, efficient, linear angular, agent attention)."""
    return mass.expand_as(den), mass * num


NORMALIZERS: dict[str, Normalizer] = {
    "divide": divide,
    "magnitude": magnitude,
    "magnitude_no_beta": magnitude_no_beta,
    "magnitude_no_gamma": magnitude_no_gamma,
    "subtract": subtract,
    "none": none,
    "sum": total,
}


def resolve_normalizer(normalizer: str | Normalizer) -> Normalizer:
    """The normalizer of that name; or the given function, whose results are then checked."""
    if isinstance(normalizer, str) and normalizer in NORMALIZERS:
        return NORMALIZERS[normalizer]
    if not callable(normalizer):
        got = repr(normalizer) if isinstance(normalizer, str) else kind(normalizer)
        raise ValueError(f"`normalizer` is {got}, expected a function or one of {', '.join(NORMALIZERS)}")
    return partial(_gain_and_level, normalizer)


def _gain_and_level(
    normalizer: Normalizer, num: Tensor, den: Tensor, mass: Tensor, scale: float, eps: float
) -> tuple[Tensor, Tensor]:
    shape = num.shape
    if len(shape) > 4:  # tokens in chunks; a function sees (batch, heads, tokens, 1)
        num, den, mass = (x.expand(shape).flatten(2, -2) for x in (num, den, mass))
    result = normalizer(num, den, mass, scale, eps)
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise TypeError(f"`normalizer(…)` is {kind(result)}, expected two tensors: gain and level")
    for name, x in zip(("gain", "level"), result, strict=True):
        check_dense(f"normalizer(…): {name}", x)
        pairs = zip(reversed(x.shape), reversed(num.shape), strict=False)
        fits = x.ndim <= num.ndim and all(size in (1, whole) for size, whole in pairs)
        if not x.is_floating_point() or not fits:
            raise ValueError(
                f"`normalizer(…)` returns a {name} of {x.dtype} and shape {tuple(x.shape)}, expected floating point "
                f"and a shape that broadcasts to {tuple(num.shape)}, the shape of num"
            )
    gain, level = (x.to(num.dtype) for x in result)
    if len(shape) > 4:
        return gain.expand(num.shape).reshape(shape), level.expand(num.shape).reshape(shape)
    return gain, level
