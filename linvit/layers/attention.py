"""Attention over the positions of a feature map, with the mechanism chosen by name."""

from functools import partial

import torch
from timm.layers import register_notrace_function, use_fused_attn
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from linvit.ops import PRESETS, Rotary, linear_attention, rotary_2d
from linvit.ops.position import rotate


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None, fused: bool) -> Tensor:
    """Scaled dot-product attention on rotated queries and keys, (batch, heads, tokens, width) in and out."""
    if rotary is not None:
        query, key = rotate(query, rotary), rotate(key, rotary)
    if fused:
        return scaled_dot_product_attention(query, key, value)
    scores = (query * query.shape[-1] ** -0.5) @ key.mT
    return scores.softmax(dim=-1) @ value


def preset_attention(
    query: Tensor, key: Tensor, value: Tensor, rotary: Rotary | None, fused: bool, preset: str
) -> Tensor:
    """Linear attention with the axes of one of PRESETS, (batch, heads, tokens, width) in and out."""
    return linear_attention(query, key, value, rotary=rotary, backend="auto" if fused else "torch", **PRESETS[preset])


MIXERS = {
    "softmax": softmax_attention,
    **{name: partial(preset_attention, preset=name) for name in PRESETS},
}


def known_mixer(name: str) -> str:
    """The name itself if it is in the table of mixers.

    Raises:
        ValueError: if it is not; the message lists the known ones.
    """
    if name not in MIXERS:
        raise ValueError(f"mixer is {name!r}, expected one of {', '.join(sorted(MIXERS))}: choose a known one")
    return name


@register_notrace_function
@torch.jit.ignore
def attend(
    mixer: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    heads: int,
    fused: bool,
) -> Tensor:
    """Mix the positions of value by one mechanism; one opaque step for FX and TorchScript.

    Args:
        mixer: a name in MIXERS.
        query, key, value: maps (batch, heads × width, height, width) of any strides, read without a copy.
        cos, sin: rotary table of the grid, each (height × width, head width / 2), or None for no positions.
        heads: number of heads.
        fused: whether a fused implementation may be chosen.

    Returns:
        A map like value, channels last in memory.
    """
    batch, channels, height, width = value.shape
    query, key, value = (x.reshape(batch, heads, x.shape[1] // heads, height * width).mT for x in (query, key, value))
    rotary = None if cos is None else Rotary(cos, sin)
    mixed = MIXERS[mixer](query, key, value, rotary, fused)
    return mixed.transpose(1, 2).reshape(batch, height, width, channels).permute(0, 3, 1, 2)


@register_notrace_function
@torch.jit.ignore
def rotary_tables(x: Tensor, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for the grid of a map (batch, channels, height, width), made once for all blocks of a stage."""
    rotary = rotary_2d((x.shape[-2], x.shape[-1]), head_width, dtype=x.dtype, device=x.device)
    return rotary.cos, rotary.sin


class Attention2d(nn.Module):
    """Attention with a local term and a gate: proj((mix(q, k, v) + lepe(v)) · modulation).

    One 1×1 convolution makes q, k, v and the modulation φ(x). RALA (arXiv 2411.07635) and MALA (arXiv 2507.00698) as
    released: the papers have neither lepe nor RoPE; the code is followed.

    Args:
        width: channels in and out.
        heads: number of heads; divides width.
        mixer: "rala", "mala", "linear" or "softmax".

    Raises:
        ValueError: if the mixer is unknown or heads does not divide width.
    """

    fused: torch.jit.Final[bool]

    def __init__(self, width: int, heads: int, mixer: str, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if width % heads:
            raise ValueError(
                f"Attention2d: width {width} is not a multiple of the {heads} heads: change one of the two"
            )
        self.heads = heads
        self.mixer = known_mixer(mixer)
        self.fused = use_fused_attn()
        self.qkvo = nn.Conv2d(width, 4 * width, 1, **dd)
        self.lepe = nn.Conv2d(width, width, 5, padding=2, groups=width, **dd)
        self.proj = nn.Conv2d(width, width, 1, **dd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, width, height, width) and the rotary table of its grid to a map of the same shape."""
        query, key, value, modulation = self.qkvo(x).chunk(4, dim=1)
        mixed = attend(self.mixer, query, key, value, cos, sin, self.heads, self.fused)
        return self.proj((mixed + self.lepe(value)) * modulation)
