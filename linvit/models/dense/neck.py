"""The feature pyramid between backbone and heads, and the convolution unit that the heads are made of."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool

from linvit.ranges import known


def conv_norm_relu(in_width: int, width: int, kernel_size: int = 3) -> nn.Sequential:
    """Convolution without bias, batch norm, ReLU; Kaiming initialization by the fan-out."""
    unit: nn.Sequential = Conv2dNormActivation(in_width, width, kernel_size)
    nn.init.kaiming_normal_(cast(nn.Conv2d, unit[0]).weight, mode="fan_out", nonlinearity="relu")
    return unit


class ExtraLevels(ExtraFPNBlock):
    """Two more levels by 3×3 convolutions of stride 2 on the backbone's last map, without ReLU in between."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.p6 = nn.Conv2d(in_width, width, 3, 2, 1)
        self.p7 = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        p6 = self.p6(x[-1])
        return [*results, p6, self.p7(p6)], [*names, "p6", "p7"]


EXTRA: Mapping[str, Callable[[int, int], nn.Module | None]] = {
    "none": lambda in_width, width: None,
    "pool": lambda in_width, width: LastLevelMaxPool(),
    "convolutions": ExtraLevels,
}


class Neck(FeaturePyramidNetwork):
    """Feature pyramid over a list of maps: nearest upsampling, Xavier initialization.

    Args:
        in_widths: channels of the maps, from fine to coarse.
        width: channels of every level.
        extra: further levels: "none"; "pool", one, every second position of the last; "convolutions", two, from the
            last map.

    Raises ValueError for an unknown extra.
    """

    def __init__(self, in_widths: Sequence[int], width: int = 256, extra: str = "none") -> None:
        super().__init__(list(in_widths), width, known("extra", extra, EXTRA)(in_widths[-1], width))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                assert module.bias is not None
                nn.init.zeros_(module.bias)

    def forward(self, maps: list[Tensor]) -> OrderedDict[str, Tensor]:
        """Maps (batch, channels, height, width) to levels "0", "1", … and the extra ones, from fine to coarse."""
        levels: OrderedDict[str, Tensor] = super().forward(OrderedDict((str(i), map_) for i, map_ in enumerate(maps)))
        return levels
