"""Feature maps κ: what a query or key becomes before the products."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

FeatureMap = Callable[[Tensor], Tensor]


def elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, positive and smooth (Katharopoulos et al., 2020); the choice of RALA, MALA and CARE."""
    return F.elu(x) + 1


def relu(x: Tensor) -> Tensor:
    """max(x, 0); a query whose every channel is negative reads nothing."""
    return F.relu(x)


def exp(x: Tensor) -> Tensor:
    """e^x; in float32 the products overflow once two channels reach about 44 together."""
    return x.exp()


def identity(x: Tensor) -> Tensor:
    """x itself; scores may be negative, so pair it with a normalizer that does not divide by their sum."""
    return x


FEATURE_MAPS: dict[str, FeatureMap] = {"elu1": elu1, "relu": relu, "exp": exp, "identity": identity}


def resolve_feature_map(feature_map: str | FeatureMap) -> FeatureMap:
    """Return the function of that name, or the callable itself.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if callable(feature_map):
        return feature_map
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"feature_map is {feature_map!r}, expected a callable or one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[feature_map]
