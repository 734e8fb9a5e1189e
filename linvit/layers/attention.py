"""Attention over the positions of a feature map, with the mechanism chosen by name."""

from collections.abc import Mapping
from typing import Any

from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from linvit.layers.checks import known
from linvit.layers.depthwise import DepthwiseConv
from linvit.layers.operator import MapSteps, Operands, known_mechanism
from linvit.layers.pointwise import PointwiseConv
from linvit.ops import Rotary, rotary_2d

AXES = ("feature_map", "weighting", "normalizer")
AROUND = ("modulation", "lepe", "rope")
# φ(x) by name: whether it acts on a projection of x (else on x itself), and what it does there; None for no φ(x)
MODULATIONS: dict[str, tuple[bool, type[nn.Module] | None]] = {
    "linear": (True, nn.Identity),
    "tanh": (True, nn.Tanh),
    "identity": (False, nn.Identity),
    "none": (False, None),
}


@register_notrace_function
def rotary_table(x: Tensor, head_width: int) -> Rotary:
    """The rotation for the grid of a map (batch, channels, height, width), made once for all blocks of a stage."""
    return rotary_2d((x.shape[-2], x.shape[-1]), head_width, dtype=x.dtype, device=x.device)


def attention_options(attention: Mapping[str, Any] | None, mechanism: str) -> dict[str, Any]:
    """The keyword arguments of one stage's Attention2d out of those of a network.

    Softmax attention has neither feature map nor weighting nor normalizer, so a softmax stage takes the others alone.

    Raises:
        ValueError: for an unknown key; the message lists the known ones.
    """
    for key in attention or {}:
        if key not in (*AXES, *AROUND):
            known_keys = ", ".join((*AXES, *AROUND))
            raise ValueError(f"`attention` has the key {key!r}, expected some of {known_keys}: choose a known one")
    linear = known_mechanism(mechanism).axes is not None
    return {key: value for key, value in (attention or {}).items() if key in AROUND or linear}


@register_notrace_module
class Attention2d(MapSteps):
    """Attention with a local term and a modulation: proj((operator(q, k, v) + lepe(v)) · φ(x)).

    One 1×1 convolution makes q, k, v and, where φ is a projection, φ(x). RALA (arXiv 2411.07635) and MALA (arXiv
    2507.00698) as released: the papers have neither lepe nor RoPE; the code is followed.

    Args:
        width, heads, mechanism: as in AttentionSteps.
        modulation: φ: "linear", a projection of x as released; "tanh" of that projection; "identity", x itself; "none".
        lepe: whether the 5×5 depthwise convolution of the values is added.
        rope: whether queries and keys are rotated by their position.
        axes: feature_map, weighting or normalizer other than the mechanism's own, see Operator.

    Raises:
        ValueError: as AttentionSteps, and for an unknown modulation.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        modulation: str = "linear",
        lepe: bool = True,
        rope: bool = True,
        device=None,
        dtype=None,
        **axes,
    ):
        dd = {"device": device, "dtype": dtype}
        super().__init__(width, heads, mechanism, place="maps", **axes, **dd)
        self.rope = rope
        self.projected, phi = known("modulation", modulation, MODULATIONS)
        self.qkvo = PointwiseConv(width, (4 if self.projected else 3) * width, **dd)
        self.lepe = DepthwiseConv(width, (5, 5), **dd) if lepe else None
        self.modulate = phi() if phi is not None else None
        self.proj = PointwiseConv(width, width, **dd)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map (batch, width, height, width) and the rotation of its grid to a map of the same shape."""
        return self.proj(self.attended(self.operands(x, rotary)))

    def operands(self, x: Tensor, rotary: Rotary) -> Operands:
        """What enters the operator: views of one projection."""
        projections = self.qkvo(x).chunk(4 if self.projected else 3, dim=1)
        tokens = (self.by_head(y) for y in projections[:3])
        gate = projections[3] if self.projected else x
        return self.operator.operands(*tokens, rotary if self.rope else None, gate=gate, grid=tuple(x.shape[-2:]))

    def with_local(self, y: Tensor, operands: Operands) -> Tensor:
        return y if self.lepe is None else y + self.lepe(value_map(operands))

    def input_layers(self) -> list[nn.Module]:
        """Every layer that reads the input; none where it is also used in another way."""
        return [] if self.modulate is not None and not self.projected else [self.qkvo]


def value_map(operands: Operands) -> Tensor:
    """The values (batch, heads, tokens, width) as the map that they were taken from: a view."""
    return operands.value.mT.flatten(1, 2).unflatten(-1, operands.grid)
