"""What a network costs: parameters, and multiply-accumulates with and without the attention products."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """Counts for one image.

    macs: multiply-accumulates of convolutions and linear layers, what the papers' tables count. macs_attention: those
    of the products between tensors inside the attention, which come on top and which the tables leave out.
    """

    parameters: int
    macs: int
    macs_attention: int


def count_cost(network: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Counts network(image) for input_size (channels, height, width), on the network's device, meta included."""
    parameter = next(network.parameters())
    image = torch.empty(1, *input_size, device=parameter.device, dtype=parameter.dtype)
    training = network.training
    counter = FlopCounterMode(display=False, depth=None)
    with torch.no_grad(), counter:
        network.eval()(image)
    network.train(training)
    root = type(network).__name__
    layers = {
        f"{root}.{name}" if name else root
        for name, module in network.named_modules()
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear))
    }
    in_layers = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name in layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(parameters, in_layers // 2, (counter.get_total_flops() - in_layers) // 2)
