"""From an image to the first map, and from one stage's map to the next."""

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

MIN_SIDE = 32


@register_notrace_function
def checked_image(x: Tensor, in_chans: int) -> Tensor:
    """The batch itself if a four-stage network can read it.

    Raises:
        ValueError: if it is not (batch, in_chans, height, width) with both sides of at least 32 px.
    """
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(
            f"input has shape {tuple(x.shape)}, expected (batch, {in_chans}, height, width): "
            f"convert the images or create the model with in_chans={x.shape[-3] if x.ndim > 2 else 'their channels'}"
        )
    # While exporting, the sides are symbols: a check would narrow the range that the exported program accepts.
    if not torch.compiler.is_exporting() and min(x.shape[-2:]) < MIN_SIDE:
        raise ValueError(
            f"input is {x.shape[-2]} × {x.shape[-1]} px, expected at least {MIN_SIDE} px a side "
            f"(the last stage has stride 32): enlarge the image"
        )
    return x


class Stem(nn.Sequential):
    """Layers at the entrance of a network; the first is the convolution that reads the image."""

    def __init__(self, in_chans: int, *layers: nn.Module):
        super().__init__(*layers)
        self.in_chans = in_chans

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, height, width) to a map at stride 4."""
        x = checked_image(x, self.in_chans)
        for layer in self:
            x = layer(x)
        return x


class ConvStem(Stem):
    """Four 3×3 convolutions with batch norm, stride 4 in all (RAVLT and MAViT)."""

    def __init__(self, in_chans: int, width: int, device=None, dtype=None):
        dd = {"device": device, "dtype": dtype}
        layers: list[nn.Module] = []
        previous = in_chans
        for out, stride in ((width // 2, 2), (width // 2, 1), (width // 2, 1), (width, 2)):
            layers += [nn.Conv2d(previous, out, 3, stride, 1, **dd), nn.BatchNorm2d(out, **dd), nn.GELU()]
            previous = out
        super().__init__(in_chans, *layers[:-1])


class PatchStem(Stem):
    """One 4×4 convolution with stride 4 and batch norm (CARE); up to 3 px at the right and bottom are not read."""

    def __init__(self, in_chans: int, width: int, device=None, dtype=None):
        dd = {"device": device, "dtype": dtype}
        super().__init__(in_chans, nn.Conv2d(in_chans, width, 4, 4, **dd), nn.BatchNorm2d(width, **dd))


class ConvDownsample(nn.Module):
    """Halve the sides, rounding up: 3×3 convolution with stride 2, then batch norm (RAVLT and MAViT)."""

    def __init__(self, in_width: int, width: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.conv = nn.Conv2d(in_width, width, 3, 2, 1, **dd)
        self.norm = nn.BatchNorm2d(width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class PatchDownsample(nn.Module):
    """Halve the sides, rounding down: batch norm, then a 2×2 convolution with stride 2 (CARE)."""

    def __init__(self, in_width: int, width: int, device=None, dtype=None):
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        self.norm = nn.BatchNorm2d(in_width, **dd)
        self.conv = nn.Conv2d(in_width, width, 2, 2, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))
