"""Attention over the positions of a feature map, with the mechanism chosen by name."""

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

from linvit.layers.axes import Axes, known_mixer
from linvit.ops import rotary_2d


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
        mixer: a name in MIXERS, such as "rala", "mala", "linear" or "softmax".

    Raises:
        ValueError: if the mixer is unknown or heads does not divide width.
    """

    def __init__(self, width: int, heads: int, mixer: str, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        if width % heads:
            raise ValueError(
                f"Attention2d: width {width} is not a multiple of the {heads} heads: change one of the two"
            )
        self.heads = heads
        self.mix = Axes(known_mixer(mixer), heads, width // heads, **dd)
        self.qkvo = nn.Conv2d(width, 4 * width, 1, **dd)
        self.lepe = nn.Conv2d(width, width, 5, padding=2, groups=width, **dd)
        self.proj = nn.Conv2d(width, width, 1, **dd)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (batch, width, height, width) and the rotary table of its grid to a map of the same shape."""
        query, key, value, modulation = self.qkvo(x).chunk(4, dim=1)
        mixed = self.mix(query, key, value, cos, sin)
        return self.proj((mixed + self.lepe(value)) * modulation)
