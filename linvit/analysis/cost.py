"""The cost of a network: parameters, and multiply-accumulates with and without the attention products."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from linvit.arguments import check_dense, check_network
from linvit.ranges import Count, check

LAYERS = (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


@dataclass(frozen=True)
class Cost:
    """Counts for one image.

    macs: multiply-accumulates (MACs) of convolutions and linear layers, as in the papers' tables. macs_attention: MACs
    of the products between tensors inside the attention, in addition to these; the tables leave them out.
    """

    parameters: int
    macs: int
    macs_attention: int


def count_cost(network: nn.Module, input_size: tuple[int, int, int]) -> Cost:
    """Counts one forward pass of a copy whose weights are zeros, on the CPU, for one image.

    The network itself may be on any device, meta included, and is not changed. input_size: (channels, height, width).
    """
    check_network("network", network)
    check({"input_size": tuple[Count, Count, Count]}, {"input_size": input_size})
    return count_batch(network, torch.zeros(1, *input_size, dtype=next(network.parameters()).dtype))


def count_batch(network: nn.Module, *inputs: Tensor) -> Cost:
    """As count_cost, for inputs on the CPU."""
    _check(network, inputs)
    twin = copy.deepcopy(network).to("meta").to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.zero_()
    return count_pass(twin, *inputs)


def count_pass(network: nn.Module, *inputs: Tensor) -> Cost:
    """Counts one forward pass of the network itself, in its current mode, on any device."""
    _check(network, inputs)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        network(*inputs)
    root = type(network).__name__
    layers = {
        f"{root}.{name}" if name else root for name, module in network.named_modules() if isinstance(module, LAYERS)
    }
    in_layers = sum(sum(ops.values()) for name, ops in counter.get_flop_counts().items() if name in layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return Cost(parameters, in_layers // 2, (counter.get_total_flops() - in_layers) // 2)


def _check(network: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    check_network("network", network)
    for index, x in enumerate(inputs):
        check_dense(f"inputs[{index}]", x)
