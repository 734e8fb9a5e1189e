"""What goes into every attention of a network, and the score matrix and outputs that follow from it."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from linvit.layers.attention import MIXERS, Attention2d
from linvit.layers.mixer import ValueAttention
from linvit.ops import PRESETS, Rotary, attention_scores
from linvit.ops.position import rotate


@dataclass(frozen=True)
class Probe:
    """Inputs of one attention for a batch of images.

    query, key, value: (batch, heads, tokens, width), before feature map and rotation. grid: (height, width) of tokens.
    """

    name: str
    mixer: str
    query: Tensor
    key: Tensor
    value: Tensor
    rotary: Rotary | None
    grid: tuple[int, int]

    def scores(self) -> Tensor:
        """The matrix that multiplies the values, (batch, heads, tokens, tokens)."""
        if self.mixer == "softmax":
            query, key = (x if self.rotary is None else rotate(x, self.rotary) for x in (self.query, self.key))
            return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1)
        return attention_scores(self.query, self.key, rotary=self.rotary, **PRESETS[self.mixer])

    def outputs(self) -> Tensor:
        """What the attention returns, before the local term and the modulation, (batch, heads, tokens, width)."""
        return MIXERS[self.mixer](self.query, self.key, self.value, self.rotary, True)


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
        parts = (_heads(part, module.heads) for part in (query, key, value))
        probes.append(Probe(name, module.mixer, *parts, Rotary(cos, sin), tuple(x.shape[-2:])))

    return hook


def _take_value_attention(name: str, probes: list[Probe]):
    def hook(module: ValueAttention, args: tuple[Tensor], output: Tensor) -> None:
        (x,) = args
        parts = (_heads(part, module.heads) for part in (*module.qk(x).chunk(2, dim=1), x))
        probes.append(Probe(name, module.mixer, *parts, None, tuple(x.shape[-2:])))

    return hook


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(1, (heads, -1)).flatten(-2).mT
