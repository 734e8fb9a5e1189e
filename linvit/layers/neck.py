"""Feature pyramids between a backbone and its heads, and the convolution that the heads are made of."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torchvision.ops import Conv2dNormActivation, FeaturePyramidNetwork
from torchvision.ops.feature_pyramid_network import ExtraFPNBlock, LastLevelMaxPool

from linvit.layers.checks import known


def conv_norm_relu(in_width: int, width: int, kernel_size: int = 3) -> nn.Sequential:
    """Convolution without bias, batch norm, ReLU; weights from a normal scaled by the fan out."""
    unit = Conv2dNormActivation(in_width, width, kernel_size)
    nn.init.kaiming_normal_(unit[0].weight, mode="fan_out", nonlinearity="relu")
    return unit


class ExtraLevels(ExtraFPNBlock):
    """Two more levels by strided 3×3 convolutions from the backbone's last map, without ReLU in between."""

    def __init__(self, in_width: int, width: int):
        super().__init__()
        self.p6 = nn.Conv2d(in_width, width, 3, 2, 1)
        self.p7 = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, results: list[Tensor], x: list[Tensor], names: list[str]) -> tuple[list[Tensor], list[str]]:
        p6 = self.p6(x[-1])
        return [*results, p6, self.p7(p6)], [*names, "p6", "p7"]


EXTRA = {
    "none": lambda in_width, width: None,
    "pool": lambda in_width, width: LastLevelMaxPool(),
    "convolutions": ExtraLevels,
}


class Neck(FeaturePyramidNetwork):
    """Feature pyramid of one width over a list of maps, nearest upsampling, Xavier initial weights.

    Args:
        in_widths: channels of the maps, from fine to coarse.
        width: channels of every level.
        extra: "none", "pool" (one more level, every second position of the last) or "convolutions" (two more levels
            from the last map).

    Raises:
        ValueError: for an unknown extra.
    """

    def __init__(self, in_widths: Sequence[int], width: int = 256, extra: str = "none"):
        super().__init__(list(in_widths), width, known("extra", extra, EXTRA)(in_widths[-1], width))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, maps: list[Tensor]) -> OrderedDict[str, Tensor]:
        """Maps (batch, channels, height, width) to levels "0", "1", … and the extra ones, from fine to coarse."""
        return super().forward(OrderedDict((str(i), tensor) for i, tensor in enumerate(maps)))
