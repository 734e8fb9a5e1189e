"""The depthwise convolutions of our networks: plain torch, the kernels, and how far these are from float64."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from linvit.bench.exactness import Deviation, error_in, relative_error
from linvit.kernels import depthwise_convolutions

Size = tuple[int, int]
OF_GELU = 1.5e-7  # the largest error of erf in the kernels (Abramowitz and Stegun, 7.1.26)


class Work(NamedTuple):
    """Convolutions of a map, and what surrounds them.

    Attributes:
        kernels: height and width of those of each group of channels; the results of two are added.
        gated: y is added, and a gate multiplies.
        gelu, residual: as of `linvit.kernels.depthwise_convolutions`.
    """

    kernels: Sequence[Sequence[Size]]
    gated: bool = False
    gelu: bool = False
    residual: bool = False


STRIPS = ((11, 1), (1, 11))
WORKS = {
    "LePE and gate": Work((((5, 5),),), gated=True),
    "position encoding": Work((((3, 3),),), residual=True),
    "feed-forward": Work((((3, 3),),), gelu=True, residual=True),
    "interaction": Work((((3, 3),),), gelu=True),
    "local groups": Work((((3, 3),), ((7, 7),))),
    "strips and local groups": Work((STRIPS, ((3, 3),), ((7, 7),))),
}


class Operands(NamedTuple):
    """Map, y and gate with channels innermost, weights, biases, and the gradient of the output."""

    x: Tensor
    y: Tensor | None
    gate: Tensor | None
    weights: list[Tensor]
    biases: list[Tensor]
    grad: Tensor

    def leaves(self) -> list[Tensor]:
        """All that gradients are for."""
        return [x for x in (self.x, self.y, self.gate, *self.weights, *self.biases) if x is not None]

    def to(self, dtype: torch.dtype) -> "Operands":
        """In another dtype, with gradients to come for all but the last."""
        leaves: Operands = tree_map_only(Tensor, lambda x: x.detach().to(dtype).requires_grad_(), self)
        return leaves._replace(grad=self.grad.to(dtype))


def operands(work: Work, shape: tuple[int, int, int, int], device: torch.device | str) -> Operands:
    """Random ones in float32; shape: images, channels of each group, height and width. x is part of a wider map."""
    batch, channels, height, width = shape
    total = channels * len(work.kernels)

    def draw(parts: int = 1) -> Tensor:
        return torch.randn(batch, height, width, parts * total, device=device)[..., :total].permute(0, 3, 1, 2)

    sizes = [size for group in work.kernels for size in group]
    weights = [torch.randn(channels, 1, *size, device=device) * (size[0] * size[1]) ** -0.5 for size in sizes]
    y, gate = (draw(), draw(2)) if work.gated else (None, None)
    return Operands(draw(2), y, gate, weights, [torch.randn(channels, device=device) for _ in sizes], draw())


def kernel(work: Work, given: Operands) -> Tensor:
    """By the kernels, in one launch."""
    groups, options = [len(group) for group in work.kernels], {"gelu": work.gelu, "residual": work.residual}
    return depthwise_convolutions(
        given.x, given.weights, given.biases, groups=groups, y=given.y, gate=given.gate, **options
    )


def plain(work: Work, given: Operands) -> Tensor:
    """By torch."""
    x = F.gelu(given.x) if work.gelu else given.x
    layers, parts, first = iter(zip(given.weights, given.biases, strict=True)), [], 0
    for sizes in work.kernels:
        results = []
        for (height, width), (weight, bias) in zip(sizes, layers, strict=False):
            channels, padding = x[:, first : first + len(weight)], (height // 2, width // 2)
            results.append(F.conv2d(channels, weight, bias, padding=padding, groups=len(weight)))
        first += len(weight)
        parts.append(results[0] if len(results) == 1 else results[0] + results[1])
    out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    out = x + out if work.residual else out
    return out if given.y is None or given.gate is None else (given.y + out) * given.gate


def results(work: Work, given: Operands, function: Callable[[Work, Operands], Tensor]) -> list[Tensor]:
    """The output and all gradients."""
    out = function(work, given)
    return [out.detach(), *torch.autograd.grad(out, given.leaves(), given.grad)]


def deviations_of(work: Work, given: Operands, dtype: torch.dtype) -> list[Deviation]:
    """The errors of output and gradients of the kernels in a dtype, and twice those of plain torch.

    Plain torch sums in another order, and nothing is better than one rounding of the result. The kernels' GELU adds the
    error of its approximation, by which the slope of a number of usual size is off by no more.
    """
    rounded = given.to(dtype)
    truth = results(work, rounded.to(torch.float64), plain)
    kernels, twins = (results(work, rounded, function) for function in (kernel, plain))
    unit, names = torch.finfo(dtype).eps / 2, ["output", *(f"gradient {i}" for i in range(len(given.leaves())))]
    rows = []
    for name, ours, torchs, exact in zip(names, kernels, twins, truth, strict=True):
        allowed = 2 * max(relative_error(torchs, exact), unit) + (OF_GELU if work.gelu else 0.0)
        rows.append(Deviation(name, error_in(dtype, ours, exact), allowed))
    return rows
