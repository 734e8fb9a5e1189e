"""The graph that is written to a file: uint8 pixels in, outputs of the network out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from linvit.files import reason_of

SMALLEST_DYNAMIC = 96  # pixels: where a map has one row, the graph would hold for one row alone


class OnPixels(nn.Module):
    """A network on uint8 images (batch, channels, height, width), which it normalizes itself.

    Args:
        network: reads normalized float32 images.
        mean, std: per channel in 0..1.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        means, deviations = (torch.tensor(values)[:, None, None] for values in (mean, std))
        self.register_buffer("scale", 1 / (255 * deviations))
        self.register_buffer("shift", -means / deviations)

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.network(images.float() * self.scale + self.shift)
        return outputs


def sample(channels: int, size: tuple[int, int], dynamic: bool) -> Tensor:
    """Black images to export a network with: one of that size, or if the graph must hold for any, two large enough."""
    side = [max(SMALLEST_DYNAMIC, length) for length in size] if dynamic else list(size)
    return torch.zeros(2 if dynamic else 1, channels, *side, dtype=torch.uint8)


def exported(network: nn.Module, images: Tensor, dynamic: bool = False) -> ExportedProgram:
    """The program of a network for these images; with `dynamic` for any batch, height and width.

    Raises ValueError for a network that torch.export cannot follow.
    """
    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()  # a channels-last weight is an error to XNNPACK
    shapes = ({0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC},) if dynamic else None
    try:
        with torch.inference_mode(False), torch.no_grad():
            program = torch.export.export(network.eval(), (images,), dynamic_shapes=shapes)
    except Exception as error:  # torch.export raises errors of many classes
        way = " for any size: set `dynamic=False`" if dynamic else ": torch.export must be able to follow it"
        raise ValueError(f"The network cannot be exported{way} ({reason_of(error)}).") from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine
    return program
