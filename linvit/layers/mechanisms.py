"""The table of attention mechanisms; every list of mechanisms elsewhere is taken from it.

The layers that `swap_attention` puts into a network are in `linvit.layers.token_mechanisms.TOKEN_LAYERS`.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from linvit.ranges import lookup

DEIT: Mapping[str, Mapping[str, Any]] = {"deit_tiny": {}}
POOLED: Mapping[str, Any] = {"class_token": False, "global_pool": "avg", "qkv_bias": False}
DEIT_AND_SWIN = {**DEIT, "swin_tiny": {}, "swin_small": {}}
SINCE_2026: Mapping[str, Mapping[str, Any]] = {**DEIT, "deit_small": {}, "swin_tiny": {}}
PREFIX = {"weighting": "prefix_query_mean"}


@dataclass(frozen=True)
class Mechanism:
    """One row of the table.

    colour: in figures.
    axes: options of `linear_attention` and `attention_scores` other than their defaults; None where there are none, in
        softmax attention and where the read is nonlinear.
    causal_axes: options that differ in causal attention.
    places: its uses besides `swap_attention`: "maps" (pyramids and CARE), "sequences" (decoders and Conformers),
        "images" (DiTs).
    networks: networks registered as BASE_MECHANISM, with arguments of their own, see linvit.models.swap.
    local_feed_forward: whether `swap_attention` adds a 3×3 depthwise convolution to the feed-forward.
    nonlinear: whether a query reads something other than a weighted sum of the values, so that there are no scores.
    """

    colour: str
    axes: Mapping[str, Any] | None = field(default_factory=dict)
    causal_axes: Mapping[str, Any] = field(default_factory=dict)
    places: tuple[str, ...] = ()
    networks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    local_feed_forward: bool = False
    nonlinear: bool = False

    @property
    def softmax(self) -> bool:
        """Whether this is softmax attention, whose time grows with the square of the number of tokens."""
        return self.axes is None and not self.nonlinear

    def axes_of(self, causal: bool) -> Mapping[str, Any] | None:
        """The axes of causal or bidirectional attention; None for softmax attention."""
        return {**self.axes, **self.causal_axes} if causal and self.axes is not None else self.axes


MECHANISMS: dict[str, Mechanism] = {
    "softmax": Mechanism("#555555", None, places=("maps", "sequences", "images"), networks=DEIT_AND_SWIN),
    "softmax_unit_query": Mechanism("#999999", None, places=("maps",), networks=DEIT),
    "linear": Mechanism("#0072B2", places=("maps", "sequences", "images"), networks=DEIT_AND_SWIN),
    "linear_relu": Mechanism("#56B4E9", {"feature_map": "relu"}, places=("maps",)),
    "linear_exp": Mechanism("#3F51B5", {"feature_map": "exp"}, places=("maps",)),
    "hydra": Mechanism("#E69F00", {"feature_map": "unit_channels", "normalizer": "sum"}, networks=DEIT_AND_SWIN),
    "efficient": Mechanism(
        "#8C564B",
        {"feature_map": ("softmax", "softmax_tokens"), "normalizer": "sum"},
        places=("maps",),
        networks=DEIT_AND_SWIN,
    ),
    "linear_angular": Mechanism("#BCBD22", {"feature_map": "unit", "normalizer": "sum"}, networks=DEIT_AND_SWIN),
    "enhanced": Mechanism("#17BECF", {"feature_map": "relu"}, networks=DEIT_AND_SWIN, local_feed_forward=True),
    "focused": Mechanism("#9467BD", {"feature_map": "focused"}, networks=DEIT_AND_SWIN),
    "inline": Mechanism(
        "#B8860B",
        {"feature_map": "identity", "normalizer": "subtract"},
        places=("maps",),
        networks={**DEIT_AND_SWIN, "deit_tiny": {"num_heads": 6}, "swin_tiny": {"pattern": "LLLS"}},
    ),
    "mlla": Mechanism("#7F3C8D", networks=DEIT_AND_SWIN),
    "agent": Mechanism(
        "#A5AA99",
        {"feature_map": "identity", "normalizer": "sum"},
        networks={**DEIT_AND_SWIN, "swin_tiny": {"pattern": "LLLS"}},
    ),
    "polaformer": Mechanism("#A50F15", {"feature_map": "relu"}, networks=DEIT_AND_SWIN),
    "mhla": Mechanism(
        "#117733", {"feature_map": "relu_eps"}, networks={"deit_tiny": POOLED, "deit_small": POOLED, "swin_tiny": {}}
    ),
    "polaformer_pp": Mechanism("#FB6A4A", {"feature_map": "relu_expm1"}, networks={**DEIT, "swin_tiny": {}}),
    "nala": Mechanism("#35978F", {"feature_map": ("norm_power", "relu_cubed")}, networks=SINCE_2026),
    "recnext": Mechanism("#BF812D", networks={**DEIT, "swin_tiny": {}}),
    "vittt": Mechanism("#6A3D9A", None, networks={**SINCE_2026, "deit_tiny": {"num_heads": 6}}, nonlinear=True),
    "rala": Mechanism(
        "#D55E00",
        {"weighting": "query_mean"},
        PREFIX,
        places=("maps", "sequences", "images"),
        networks=DEIT_AND_SWIN,
    ),
    "mala": Mechanism(
        "#009E73",
        {"normalizer": "magnitude"},
        places=("maps", "sequences", "images"),
        networks=DEIT_AND_SWIN,
    ),
    "rala_mala": Mechanism(
        "#CC79A7",
        {"weighting": "query_mean", "normalizer": "magnitude"},
        PREFIX,
        places=("maps", "sequences"),
        networks=DEIT,
    ),
}
LINEAR_AXES: dict[str, Mapping[str, Any]] = {
    name: mechanism.axes for name, mechanism in MECHANISMS.items() if mechanism.axes is not None
}
"""The options of `linear_attention` of each linear mechanism."""


def at(place: str) -> dict[str, Mechanism]:
    """The mechanisms that can stand in a place."""
    return {name: mechanism for name, mechanism in MECHANISMS.items() if place in mechanism.places}


def mechanism_of(name: str, place: str | None = None) -> Mechanism:
    """The row of that mechanism."""
    return lookup("mechanism", name, MECHANISMS if place is None else at(place))


def list_mechanisms(pattern: str = "*") -> list[str]:
    """The names of the attention mechanisms that fit a pattern, such as "*rala*"."""
    return fnmatch.filter(MECHANISMS, pattern)
