"""CARE's token mixer and its dual interaction (arXiv 2411.16170)."""

import torch
from torch import Tensor, nn

from linvit.layers.axes import Axes, known_mixer

STRIPS = "strips"


class Strips(nn.Module):
    """Depthwise 11×1 plus 1×11 convolutions: the cheap stand-in for attention on large maps."""

    def __init__(self, width: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.vertical = nn.Conv2d(width, width, (11, 1), padding=(5, 0), groups=width, **dd)
        self.horizontal = nn.Conv2d(width, width, (1, 11), padding=(0, 5), groups=width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.vertical(x) + self.horizontal(x)


class ValueAttention(nn.Module):
    """Attention whose value is the input itself; only query and key are projected.

    The paper calls the feature map an identity; the released code takes elu + 1 with a normaliser and is followed.
    """

    def __init__(self, width: int, head_width: int, mixer: str = "linear", device=None, dtype=None):
        super().__init__()
        if width % head_width:
            raise ValueError(
                f"ValueAttention: width {width} is not a multiple of the head width {head_width}: change one"
            )
        self.heads = width // head_width
        self.mix = Axes(known_mixer(mixer), self.heads, head_width, device=device, dtype=dtype)
        self.qk = nn.Conv2d(width, 2 * width, 1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.qk(x).chunk(2, dim=1)
        return self.mix(query, key, x, None, None)


class TokenMixer(nn.Module):
    """Mix three equal parts of the features apart from each other, and leave the memory alone.

    Args:
        part: channels of each of the three parts: attended, local 3×3, local 7×7.
        head_width: channels of a head of the attended part; unused for strips.
        mixer: "strips", or a mechanism: "linear" in the paper.
    """

    def __init__(self, part: int, head_width: int, mixer: str, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.attended = Strips(part, **dd) if mixer == STRIPS else ValueAttention(part, head_width, mixer, **dd)
        self.local3 = nn.Conv2d(part, part, 3, padding=1, groups=part, **dd)
        self.local7 = nn.Conv2d(part, part, 7, padding=3, groups=part, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, 3 × part, height, width) to features of the same shape."""
        attended, local3, local7 = x.chunk(3, dim=1)
        return torch.cat((self.attended(attended), self.local3(local3), self.local7(local7)), dim=1)


class Interaction(nn.Module):
    """An inverted bottleneck that lets channels speak to each other: norm, 1×1, GELU, depthwise 3×3, 1×1, plus input.

    Args:
        width: channels in.
        ratio: hidden channels over width.
        project: whether the last 1×1 convolution and the sum follow; without it the hidden map is the output.
    """

    def __init__(self, width: int, ratio: int, project: bool = True, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        hidden = width * ratio
        self.norm = nn.BatchNorm2d(width, **dd)
        self.fc1 = nn.Conv2d(width, hidden, 1, **dd)
        self.act = nn.GELU()
        self.conv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **dd)
        self.fc2 = nn.Conv2d(hidden, width, 1, **dd) if project else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.conv(self.act(self.fc1(self.norm(x))))
        if self.fc2 is None:
            return hidden
        return self.fc2(hidden) + x
