"""Normalizers: how a read-out's mass is set.

With c = Σ_j α_j (Rκ(q)·Rκ(k_j)) (v_j - u), the covariance that a query reads, and u = Σ_j α_j v_j, the mean value,
every normalizer gives

    out = gain · c + level · u

where gain and level are functions of two numbers a query: num = Σ_j α_j Rκ(q)·Rκ(k_j) and den = Σ_j α_j κ(q)·κ(k_j),
equal unless a rotation is used. Written so, nothing large is ever subtracted from something large. The level is also
the sum of the query's row of the score matrix.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Normalizer = Callable[[Tensor, Tensor, float, float], tuple[Tensor, Tensor]]


def divide(num: Tensor, den: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Divide by the sum of the row (vanilla linear attention, RALA, CARE): out = num·v / (den + eps).

    Rows sum to one without rotation. The query's magnitude cancels.
    """
    gain = 1 / (den + eps)
    return gain, num * gain


def magnitude(num: Tensor, den: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Keep the query's magnitude: out = s·num·v·(1 + 1/(s·den + eps)) - s·den·u.

    Source: MALA (ICCV 2025). The paper's similarity is φ(q)·φ(k); the released code, which we follow, multiplies it by
    s/N with s = 1/√width, and adds eps = 1e-6. Rows sum to one without rotation.
    """
    share = scale / (scale * den + eps)
    return scale + share, scale * (num - den) + share * num


def subtract(num: Tensor, den: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """Subtract the mean instead of dividing: out = s·num·v + (1 - s·den)·u.

    Source: InLine attention (NeurIPS 2024). Rows sum to one without rotation; no division.
    """
    return torch.full_like(den, scale), scale * (num - den) + 1


def none(num: Tensor, den: Tensor, scale: float, eps: float) -> tuple[Tensor, Tensor]:
    """out = num·v: for feature maps that need no normalizer."""
    return torch.ones_like(den), num


NORMALIZERS: dict[str, Normalizer] = {"divide": divide, "magnitude": magnitude, "subtract": subtract, "none": none}


def resolve_normalizer(normalizer: str) -> Normalizer:
    """Return the normalizer of that name.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if normalizer not in NORMALIZERS:
        raise ValueError(f"normalizer is {normalizer!r}, expected one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[normalizer]
