"""What goes into every attention of a network, and the score matrix and outputs that follow from it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linvit.layers.attention import Attention2d
from linvit.layers.axes import Axes, Operands
from linvit.layers.mixer import ValueAttention
from linvit.ops import Rotary


@dataclass(frozen=True)
class Probe:
    """Inputs of one attention for a batch of images.

    operands: (batch, heads, tokens, width), before feature map and rotation. grid: (height, width) of tokens.
    """

    name: str
    mixer: str
    operands: Operands
    grid: tuple[int, int]

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, tokens, tokens)."""
        return self.operands.scores()

    def outputs(self) -> Tensor:
        """What the attention returns, before the local term and the modulation, (batch, heads, tokens, width)."""
        return self.operands.output()


@torch.no_grad()
def probe(network: nn.Module, images: Tensor) -> list[Probe]:
    """Run the network in eval mode on images and return the inputs of each attention, in order.

    Raises:
        ValueError: if the network has no attention of ours.
    """
    probes: list[Probe] = []
    handles = []
    for name, module in network.named_modules():
        if isinstance(module, Attention2d):
            handles.append(module.register_forward_hook(_take_attention(name, probes)))
        elif isinstance(module, ValueAttention):
            handles.append(module.register_forward_hook(_take_value_attention(name, probes)))
    if not handles:
        raise ValueError(
            f"{type(network).__name__} has no attention to look at, expected a RAVLT, MAViT or CARE network"
        )
    training = network.training
    try:
        network.eval()(images)
    finally:
        network.train(training)
        for handle in handles:
            handle.remove()
    return probes


def _take_attention(name: str, probes: list[Probe]):
    def hook(module: Attention2d, args: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        x, cos, sin = args
        query, key, value, _ = module.qkvo(x).chunk(4, dim=1)
        probes.append(_probe(name, module.mix, (query, key, value), Rotary(cos, sin)))

    return hook


def _take_value_attention(name: str, probes: list[Probe]):
    def hook(module: ValueAttention, args: tuple[Tensor], output: Tensor) -> None:
        (x,) = args
        probes.append(_probe(name, module.mix, (*module.qk(x).chunk(2, dim=1), x), None))

    return hook


def _probe(name: str, axes: Axes, maps: tuple[Tensor, ...], rotary: Rotary | None) -> Probe:
    operands = axes.operands(*(x.unflatten(1, (axes.heads, -1)).flatten(-2).mT for x in maps), rotary)
    return Probe(name, axes.mixer, operands, tuple(maps[-1].shape[-2:]))
