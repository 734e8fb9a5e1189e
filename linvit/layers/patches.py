"""From an image to the first map, and from the map of one stage to that of the next."""

from typing import Unpack

import torch
from timm.layers import register_notrace_function
from torch import Tensor, nn

from linvit.errors import SettingError
from linvit.layers.checks import TensorOptions, check_filled, check_floats
from linvit.layers.convolutions import PointwiseConv, runs_on_onednn

MIN_SIDE = 32


@register_notrace_function
def checked_image(x: Tensor, in_chans: int, device: torch.device | None = None) -> Tensor:
    """The batch itself if a four-stage network can read it.

    Args:
        x: images, at least one.
        in_chans: their channels.
        device: of the network's weights.
    """
    remedy = "convert the images"
    if isinstance(x, Tensor) and x.ndim > 2:
        remedy += f" or create the model with in_chans={x.shape[-3]}"
    check_floats("input", x, ("batch", in_chans, "height", "width"), remedy)
    if device is not None and device.type != "meta" and x.device != device:
        raise SettingError(f"`input` is on {x.device}, but the network is on {device}: move one of them with `.to(…)`")
    check_filled("input", x)
    # During export the sides are symbols: a check would narrow the range that the exported program accepts.
    if not torch.compiler.is_exporting() and min(x.shape[-2:]) < MIN_SIDE:
        raise SettingError(
            f"`input` is {x.shape[-2]} × {x.shape[-1]} px, expected sides of at least {MIN_SIDE} px "
            f"(the last stage has stride 32): enlarge the images"
        )
    return x


class Stem(nn.Sequential):
    """The first layers of a network; the first of them is the convolution that reads the image.

    In inference on a CPU its maps are channels_last, for products of oneDNN in all layers that follow.
    """

    def __init__(self, in_chans: int, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.in_chans = in_chans

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, in_chans, height, width) to a map at stride 4."""
        weight = getattr(self[0], "weight", None)
        x = checked_image(x, self.in_chans, weight.device if isinstance(weight, Tensor) else None)
        if isinstance(weight, Tensor) and runs_on_onednn(x, weight):
            x = x.contiguous(memory_format=torch.channels_last)
        for layer in self:
            x = layer(x)
        return x


class ConvStem(Stem):
    """Four 3×3 convolutions with batch norm, total stride 4 (RAVLT and MAViT)."""

    def __init__(self, in_chans: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        layers: list[nn.Module] = []
        previous = in_chans
        for out, stride in ((width // 2, 2), (width // 2, 1), (width // 2, 1), (width, 2)):
            layers += [nn.Conv2d(previous, out, 3, stride, 1, **dd), nn.BatchNorm2d(out, **dd), nn.GELU()]
            previous = out
        super().__init__(in_chans, *layers[:-1])


class ReluStem(Stem):
    """3×3 convolutions with batch norm and ReLU, total stride 4, the last to 4 × width, and a 1×1 to width (H-ViT³)."""

    def __init__(self, in_chans: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        layers: list[nn.Module] = []
        previous = in_chans
        for out, side, stride in ((width // 2, 3, 2), *2 * ((width // 2, 3, 1),), (4 * width, 3, 2), (width, 1, 1)):
            layers.append(nn.Conv2d(previous, out, side, stride, side // 2, bias=False, **dd))
            layers += [nn.BatchNorm2d(out, **dd), nn.ReLU()]
            previous = out
        super().__init__(in_chans, *layers[:-1])


class PatchStem(Stem):
    """A 4×4 convolution with stride 4 and batch norm (CARE); up to 3 px at the right and bottom edge are not read."""

    def __init__(self, in_chans: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__(in_chans, nn.Conv2d(in_chans, width, 4, 4, **dd), nn.BatchNorm2d(width, **dd))


class ConvDownsample(nn.Module):
    """Halve the sides, rounded up: 3×3 convolution with stride 2, then batch norm (RAVLT and MAViT)."""

    def __init__(self, in_width: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_width, width, 3, 2, 1, **dd)
        self.norm = nn.BatchNorm2d(width, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class InvertedDownsample(nn.Sequential):
    """Halve the sides, rounded up: 1×1 to 4 × width, ReLU, 3×3 depthwise with stride 2, ReLU, 1×1, norm (H-ViT³)."""

    def __init__(self, in_width: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        hidden = 4 * width
        depthwise = nn.Conv2d(hidden, hidden, 3, 2, 1, groups=hidden, **dd)
        last = PointwiseConv(hidden, width, **dd), nn.BatchNorm2d(width, **dd)
        super().__init__(PointwiseConv(in_width, hidden, **dd), nn.ReLU(), depthwise, nn.ReLU(), *last)


class PatchDownsample(nn.Module):
    """Halve the sides, rounded down: batch norm, then a 2×2 convolution with stride 2 (CARE)."""

    def __init__(self, in_width: int, width: int, **dd: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_width, **dd)
        self.conv = nn.Conv2d(in_width, width, 2, 2, **dd)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))
