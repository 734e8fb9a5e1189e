"""Attention over the positions of a feature map, with the mechanism chosen by name."""

from collections.abc import Mapping
from typing import Any

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

from linvit.layers.axes import SOFTMAX, Axes, known_mechanism
from linvit.layers.depthwise import DepthwiseConv
from linvit.layers.pointwise import PointwiseConv
from linvit.ops import rotary_2d

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
@torch.jit.ignore
def rotary_tables(x: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the grid of a map (batch, channels, height, width), made once for all blocks of a stage."""
    rotary = rotary_2d((x.shape[-2], x.shape[-1]), head_width, dtype=x.dtype, device=x.device)
    return rotary.cos, rotary.sin


def known_modulation(name: str) -> tuple[bool, type[nn.Module] | None]:
    """The entry of MODULATIONS.

    Raises:
        ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in MODULATIONS:
        raise ValueError(f"modulation is {name!r}, expected one of {', '.join(MODULATIONS)}: choose a known one")
    return MODULATIONS[name]


def attention_options(attention: Mapping[str, Any] | None, mechanism: str) -> dict[str, Any]:
    """The keyword arguments of one stage's Attention2d out of those of a network.

    Softmax attention has neither feature map nor weighting nor normalizer, so a softmax stage takes the others alone.

    Raises:
        ValueError: for an unknown key; the message lists the known ones.
    """
    attention = attention or {}
    unknown = [key for key in attention if key not in (*AXES, *AROUND)]
    if unknown:
        raise ValueError(
            f"attention has the key {unknown[0]!r}, expected some of {', '.join((*AXES, *AROUND))}: choose a known one"
        )
    return {key: value for key, value in attention.items() if key in AROUND or mechanism not in SOFTMAX}


class Attention2d(nn.Module):
    """Attention with a local term and a modulation: proj((mix(q, k, v) + lepe(v)) · φ(x)).

    One 1×1 convolution makes q, k, v and, where φ is a projection, φ(x). RALA (arXiv 2411.07635) and MALA (arXiv
    2507.00698) as released: the papers have neither lepe nor RoPE; the code is followed.

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mechanism: a name in MECHANISMS, such as "rala", "mala", "linear" or "softmax".
        modulation: φ: "linear", a projection of x as released; "tanh" of that projection; "identity", x itself; "none".
        lepe: whether the 5×5 depthwise convolution of the values is added.
        rope: whether queries and keys are rotated by their position.
        axes: feature_map, weighting or normalizer other than the mechanism's own, see Axes.

    Raises:
        ValueError: if the mechanism or the modulation is unknown or heads does not divide width.
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
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if width % heads:
            raise ValueError(
                f"Attention2d: width {width} is not a multiple of the {heads} heads: change one of the two"
            )
        self.heads, self.rope = heads, rope
        self.projected, phi = known_modulation(modulation)
        self.chunks = 4 if self.projected else 3
        self.mix = Axes(known_mechanism(mechanism), heads, width // heads, **axes, **dd)
        self.qkvo = PointwiseConv(width, self.chunks * width, **dd)
        self.lepe = DepthwiseConv(width, (5, 5), **dd) if lepe else None
        self.modulate = phi() if phi is not None else None
        self.proj = PointwiseConv(width, width, **dd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, width, height, width) and the rotary table of its grid to a map of the same shape."""
        parts = self.qkvo(x).chunk(self.chunks, dim=1)
        value = parts[2]
        if self.rope:
            mixed = self.mix(parts[0], parts[1], value, cos, sin)
        else:
            mixed = self.mix(parts[0], parts[1], value, None, None)
        if self.lepe is not None:
            mixed = mixed + self.lepe(value)
        if self.modulate is not None:
            mixed = mixed * self.modulate(parts[3] if self.projected else x)
        return self.proj(mixed)
