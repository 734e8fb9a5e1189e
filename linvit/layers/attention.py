"""Attention over the positions of a feature map, with the mechanism chosen by name."""

from collections.abc import Mapping
from typing import Any

from timm.layers import register_notrace_function, register_notrace_module
from torch import Tensor, nn

from linvit.layers.checks import Device, Dtype, TensorOptions, check_turns
from linvit.layers.convolutions import DepthwiseConv, PointwiseConv, depthwise_on_gpu
from linvit.layers.mechanisms import mechanism_of
from linvit.layers.operator import AttentionLayer
from linvit.ops import Rotary, rotary_2d
from linvit.ops.backend import depthwise_kernels_for
from linvit.ranges import Count, check_keys, lookup

AXES = ("feature_map", "weighting", "normalizer", "blocks", "block_sides")
Operands = tuple[Tensor, Tensor, Tensor, Rotary | None]
AROUND = ("modulation", "lepe", "rope")
# φ(x) by name: whether it is applied to a projection of x or to x itself, and the function; None for no φ(x)
MODULATIONS: dict[str, tuple[bool, type[nn.Module] | None]] = {
    "linear": (True, nn.Identity),
    "tanh": (True, nn.Tanh),
    "silu": (True, nn.SiLU),
    "identity": (False, nn.Identity),
    "none": (False, None),
}


@register_notrace_function
def rotary_table(x: Tensor, head_width: int, first_row: int = 0) -> Rotary:
    """The rotation for the grid of a map (batch, channels, height, width), made once for all blocks of a stage.

    first_row: number of the map's first row, if it is only some rows of the map.
    """
    size = (x.shape[-2], x.shape[-1])
    return rotary_2d(size, head_width, first_row=first_row, dtype=x.dtype, device=x.device)


def attention_options(attention: Mapping[str, Any] | None, mechanism: str) -> dict[str, Any]:
    """The keyword arguments of one stage's Attention2d, taken from those of the whole network.

    Softmax attention has no feature map, weighting or normalizer: a softmax stage gets only the other options.
    """
    keys = (*AXES, *AROUND)
    check_keys("attention", attention or {}, keys)
    linear = mechanism_of(mechanism).axes is not None
    return {key: value for key, value in (attention or {}).items() if key in AROUND or linear}


@register_notrace_module
class Attention2d(AttentionLayer):
    """Attention with a local term and a gate: proj((operator(q, k, v) + lepe(v)) · φ(x)).

    One 1×1 convolution computes q, k, v and, if φ needs it, a further projection. RALA (arXiv 2411.07635) and MALA
    (arXiv 2507.00698) as released: their papers mention neither LePE nor RoPE; we follow their code, which has both.

    Args:
        width, heads, mechanism: as in AttentionLayer.
        modulation: φ: "linear", a projection of x, as released; "tanh" or "silu" of that projection; "identity", x
            itself; "none", no gate.
        lepe: add a 5×5 depthwise convolution of the values (LePE).
        rope: rotate queries and keys by their position.
        blocks, block_sides: see Operator.
        axes: feature_map, weighting or normalizer in place of the mechanism's own, see Operator.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        mechanism: str,
        modulation: str = "linear",
        lepe: bool = True,
        rope: bool = True,
        blocks: tuple[Count, Count] | None = None,
        block_sides: tuple[Count, Count] | None = None,
        device: Device = None,
        dtype: Dtype = None,
        **axes: Any,
    ) -> None:
        dd: TensorOptions = {"device": device, "dtype": dtype}
        options: dict[str, Any] = {"place": "maps", "blocks": blocks, "block_sides": block_sides, **axes}
        super().__init__(width, heads, mechanism, **options, **dd)
        if rope:
            check_turns(width // heads, axes=2)
        self.rope = rope
        self.projected, phi = lookup("modulation", modulation, MODULATIONS)
        self.qkvo = PointwiseConv(width, (4 if self.projected else 3) * width, **dd)
        self.lepe = DepthwiseConv(width, (5, 5), **dd) if lepe else None
        self.modulate = phi() if phi is not None else None
        self.proj = PointwiseConv(width, width, **dd)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Map (batch, width, height, width) and the rotation of its grid to a map of the same shape."""
        return self.proj(self.mixed(x, rotary))

    def mixed(self, x: Tensor, rotary: Rotary) -> Tensor:
        """The map that the last projection reads."""
        grid = (x.shape[-2], x.shape[-1])
        projections = self.qkvo(x).chunk(4 if self.projected else 3, dim=1)
        query, key, value = (tokens_of_map(y, self.heads) for y in projections[:3])
        y = self.operator(*self.operands(query, key, value, rotary if self.rope else None), grid=grid)
        y = self.operator.as_map(y, grid)
        values, gate = value.mT.flatten(1, 2).unflatten(-1, grid), projections[3] if self.projected else x
        out = self.at_once(y, values, gate)
        return self.gated(self.with_local(y, values), gate) if out is None else out

    def operands(self, query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None) -> Operands:
        """What the operator reads: query, key and value, (batch, heads, tokens, width), and the rotation."""
        return query, key, value, rotary

    def at_once(self, y: Tensor, value: Tensor, gate: Tensor) -> Tensor | None:
        """`gated` of `with_local` in one launch; None where plain torch computes it, or something records the steps."""
        if (
            self.lepe is None
            or depthwise_kernels_for(value) is None
            or "with_local" in vars(self)
            or "gated" in vars(self)
        ):
            return None
        return depthwise_on_gpu(value, [[self.lepe]], y, None if self.modulate is None else self.modulate(gate))

    def with_local(self, y: Tensor, value: Tensor) -> Tensor:
        """The output of the operator plus LePE; both are maps."""
        return y if self.lepe is None else y + self.lepe(value)

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """That output times φ of the map `gate`."""
        return y if self.modulate is None else y * self.modulate(gate)

    def input_layers(self) -> list[nn.Module]:
        """Every layer that reads the input; none if the input is also used directly."""
        return [] if self.modulate is not None and not self.projected else [self.qkvo]


def tokens_of_map(y: Tensor, heads: int) -> Tensor:
    """A map (batch, heads × width, height, width) as (batch, heads, tokens, width)."""
    return y.reshape(y.shape[0], heads, y.shape[1] // heads, -1).mT
