"""The definition (first version, bidirectional; the whole of it follows)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.ops.position import Rotary, rotate


def linear_attention(query, key, value, *, feature_map="elu1", weighting="uniform", normalizer="divide",
                     rotary: Rotary | None = None, key_mask=None, causal=False, state=None, eps=1e-6, backend="auto") -> Tensor:
    dtype = value.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (F.elu(query.to(wide)) + 1), (F.elu(key.to(wide)) + 1), value.to(wide)
    s = q.shape[-1] ** -0.5
    if weighting == "query_mean":
        a = (s * q.mean(-2, keepdim=True) @ k.mT).softmax(-1)
    else:
        a = torch.full_like(k[..., :1].mT, 1 / k.shape[-2])
    z, u = a @ k, a @ v
    den = q @ z.mT
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    num = q @ ((k * a.mT).mT @ v)
    if normalizer == "divide":
        out = num / (den + eps)
    else:
        out = s * num * (1 + 1 / (s * den + eps)) - s * den * u
    return out.to(dtype)


def rala(query, key, value, *, rotary=None, **kwargs):
    return linear_attention(query, key, value, weighting="query_mean", rotary=rotary, **kwargs)


def mala(query, key, value, *, rotary=None, **kwargs):
    return linear_attention(query, key, value, normalizer="magnitude", rotary=rotary, **kwargs)
