"""Feature maps κ: functions that are applied to queries and keys before the products.

All keep the shape (batch, heads, tokens, width). Most are elementwise; the others say which axes they combine.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linvit.arguments import check_dense, kind

FeatureMap = Callable[[Tensor], Tensor]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive and smooth (Katharopoulos et al., 2020); the choice of RALA, MALA and CARE."""
    if torch.compiler.is_exporting():
        return F.elu(x) + 1  # one node that exporters know
    if torch.compiler.is_compiling():  # its own derivative: that of F.elu has other strides than compilers assume
        return x.clamp_max(0).exp() + F.relu(x)
    if torch.is_grad_enabled() and x.requires_grad:
        return _Elu1.apply(x)
    return _elu1(x)


def _elu1(x: Tensor) -> Tensor:
    """Twice as fast on a CPU as F.elu(x) + 1, because expm1 costs six times as much as exp."""
    return x.clamp_max(0).exp_().add_(F.relu(x))


class _Elu1(torch.autograd.Function):
    """The derivative of y = elu(x) + 1 is min(y, 1), so only y is saved, which the matrix products save anyway."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _elu1(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slope: Tensor = y.clamp_max(1)
        return slope.mul_(grad) if not torch.is_grad_enabled() else slope * grad

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        slope: Tensor = y.clamp_max(1)
        return slope * tangent


def relu(x: Tensor) -> Tensor:
    """max(x, 0); a query with only negative channels reads nothing."""
    return F.relu(x)


def relu_eps(x: Tensor) -> Tensor:
    """max(x, 0) + 1e-6 (MHLA, ICLR 2026): positive, so that rows of scores never sum to zero."""
    return F.relu(x) + 1e-6


def exp(x: Tensor) -> Tensor:
    """e^x; in float32 the products overflow once two channels reach about 44 together."""
    return x.exp()


def identity(x: Tensor) -> Tensor:
    """x itself; scores may be negative, so pair it with a normalizer that does not divide by their sum."""
    return x


def unit(x: Tensor) -> Tensor:
    """x / |x| over the width of a head (linear angular attention, Castling-ViT, CVPR 2023)."""
    return F.normalize(x, dim=-1)


def unit_channels(x: Tensor) -> Tensor:
    """x / |x| over all channels, heads × width (Hydra attention, Bolya et al., 2022, where a head is one channel)."""
    return x / _norm(x).clamp_min(1e-12)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the width of a head (the queries of efficient attention, Shen et al., WACV 2021)."""
    return x.softmax(-1)


def softmax_tokens(x: Tensor) -> Tensor:
    """Softmax over the tokens, channel by channel (the keys of efficient attention); neither masked nor causal."""
    return x.softmax(-2)


def focused(x: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
    """Cube y = (relu(x) + 1e-6) / temperature elementwise, rescaled to the norm of y over all channels, heads × width.

    Source: focused linear attention (FLatten, ICCV 2023), power 3. The temperature, broadcast against x, is the
    softplus of a learned vector there.
    """
    y = relu_eps(x) / temperature
    cubed = y * y * y
    return cubed * (_norm(y) / _norm(cubed))


def norm_power(x: Tensor) -> Tensor:
    """Each channel's share of the norm r of relu(x), to the power 3(1/2 + tanh r), one for each token and head.

    Source: the queries of NaLaFormer (arXiv 2506.21137) as released, where x is [q, -q], so that r is the norm of q. A
    query of zeros has features of zeros here, and is divided by zero there.
    """
    positive = F.relu(x)
    norm = torch.linalg.vector_norm(positive, dim=-1, keepdim=True)
    share: Tensor = positive / norm.clamp_min(1e-12)
    return share ** (3 * (0.5 + norm.tanh()))


def relu_cubed(x: Tensor) -> Tensor:
    """max(x, 0)³ (the keys of NaLaFormer, where x is [k, -k])."""
    return F.relu(x) ** 3


def relu_expm1(x: Tensor) -> Tensor:
    """e^max(x, 0) - 1 (PolaFormer++, where x is [k, -k]); in float32 products overflow as those of `exp`."""
    return F.relu(x).expm1()


def _norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)


FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu1": elu1,
    "relu": relu,
    "relu_eps": relu_eps,
    "exp": exp,
    "identity": identity,
    "unit": unit,
    "unit_channels": unit_channels,
    "softmax": softmax,
    "softmax_tokens": softmax_tokens,
    "focused": focused,
    "norm_power": norm_power,
    "relu_cubed": relu_cubed,
    "relu_expm1": relu_expm1,
}
ACROSS_TOKENS = ("softmax_tokens",)
ACROSS_HEADS = ("unit_channels", "focused")


def sees_one_token(feature_map: FeatureMap) -> bool:
    """Whether the map is known to treat each token by itself, so that tokens can be mapped in blocks."""
    return any(feature_map is known for name, known in FEATURE_MAPS.items() if name not in ACROSS_TOKENS)


def resolve_feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    """The function of that name; or the given function, whose results are then checked."""
    if isinstance(feature_map, str) and feature_map in FEATURE_MAPS:
        return FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        got = repr(feature_map) if isinstance(feature_map, str) else kind(feature_map)
        raise ValueError(
            f"`feature_map` is {got}, expected a function, one of {', '.join(FEATURE_MAPS)}, or a pair of these: the "
            "queries' and the keys'"
        )
    return feature_map if feature_map in FEATURE_MAPS.values() else partial(_keeping_form, feature_map)


def _keeping_form(feature_map: FeatureMap, x: Tensor) -> Tensor:
    features = feature_map(x)
    check_dense("feature_map(x)", features)
    if (features.shape, features.dtype, features.device) != (x.shape, x.dtype, x.device):
        raise ValueError(
            f"`feature_map(x)` is {features.dtype} of shape {tuple(features.shape)} on {features.device}, expected "
            f"{x.dtype} of shape {tuple(x.shape)} on {x.device}, as x is"
        )
    return features


def query_and_key_map(
    feature_map: str | FeatureMap | tuple[str | FeatureMap, str | FeatureMap], every_token_counts: bool
) -> tuple[FeatureMap, FeatureMap]:
    """The feature maps of queries and keys: the same one unless a pair is given.

    Raises:
        ValueError: for anything but a known name, a function or a pair of these, or a map across tokens unless every
            query sees every token.
    """
    pair = feature_map if isinstance(feature_map, tuple | list) else (feature_map, feature_map)
    if len(pair) != 2:
        raise ValueError(f"`feature_map` has {len(pair)} entries, expected one, or a pair: the queries' and the keys'")
    for name in pair:
        if isinstance(name, str) and name in ACROSS_TOKENS and not every_token_counts:
            raise ValueError(
                f"`feature_map` is {name!r}, which combines all tokens, so it has no causal form and accepts no "
                "`key_mask`, no `cu_seqlens` and no `shard`: use an elementwise one such as 'elu1'"
            )
    query_map = resolve_feature_map(pair[0])
    return query_map, query_map if pair[1] is pair[0] else resolve_feature_map(pair[1])
