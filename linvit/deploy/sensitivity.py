"""How much each layer of a program loses in 8 bits, alone, and what the steps would lose that stay in float32."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from linvit.deploy.quantizing import (
    CONVOLUTIONS,
    ROUNDINGS,
    Rounding,
    equalized,
    layers_of,
    names_of,
    specifications,
    steps_of,
)
from linvit.deploy.runtime import silent_stderr
from linvit.files import write_csv

IMAGES = 16  # to measure on


@dataclass(frozen=True)
class Sensitivity:
    """What the outputs lose if a part of the network is computed in 8 bits.

    name: of a layer, of a kind of step, or of all. rounded: whether the part is in 8 bits in the file. error: root mean
    square of the difference in the least exact output over that of the output.
    """

    name: str
    rounded: bool
    error: float


class _Rounded(Interpreter):
    """Runs a program with some steps between roundings, each calibrated on the images that it runs on."""

    def __init__(self, module: GraphModule, rounding: Rounding) -> None:
        super().__init__(module)
        self.layers = set(layers_of(module))
        self.chosen: Collection[Node] = ()
        self.activation, self.weight = specifications(rounding.activations)
        self.outputs = rounding.outputs

    def outputs_with(self, chosen: Collection[Node], images: Tensor) -> list[Tensor]:
        self.chosen = chosen
        with torch.no_grad():
            return list(self.run(images, enable_io_processing=True))

    def run_node(self, n: Node) -> Any:
        if n not in self.chosen:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        layer = n.target in CONVOLUTIONS or n in self.layers
        specifications = [self.activation, self.weight if layer else self.activation, *[None] * len(args)]
        rounded = tuple(_rounded(x, by) for x, by in zip(args, specifications, strict=False))
        result = n.target(*rounded, **kwargs)  # type: ignore[operator]
        return _rounded(result, self.activation if self.outputs or not layer else None)


def _rounded(x: Any, by: Any) -> Any:
    """A float tensor rounded to 8 bits and back; anything else as it is."""
    if by is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    axis = {} if by.ch_axis is None else {"ch_axis": by.ch_axis}
    observer = by.observer_or_fake_quant_ctr.with_args(
        dtype=by.dtype, quant_min=by.quant_min, quant_max=by.quant_max, qscheme=by.qscheme, **axis
    )()
    observer(x)
    scale, zero = observer.calculate_qparams()
    if by.ch_axis is not None:
        return torch.fake_quantize_per_channel_affine(x, scale, zero.int(), by.ch_axis, by.quant_min, by.quant_max)
    return torch.fake_quantize_per_tensor_affine(x, float(scale), int(zero), by.quant_min, by.quant_max)


def sensitivity(program: ExportedProgram, images: Tensor, suffix: str, dynamic: bool) -> list[Sensitivity]:
    """The error of every layer that `quantized` rounds, alone, then of the other steps by kind, and of all together.

    Args:
        program: in float32.
        images: to measure and calibrate on, (images, channels, height, width); the first 16 are used, or one.
        suffix: of the file, whose runtime decides how layers are rounded.
        dynamic: whether the program reads any number of images.
    """
    with silent_stderr():
        import torchao.quantization.pt2e  # noqa: F401 - prints on import

    images = images[: IMAGES if dynamic else 1].clone()
    with torch.no_grad():
        module = equalized(program.module(check_guards=False), [images])
    run = _Rounded(module, ROUNDINGS[suffix])
    layers = layers_of(module)
    exact = run.outputs_with((), images)

    def row(name: str, rounded: bool, *chosen: Node) -> Sensitivity:
        got = run.outputs_with(set(chosen), images)
        pairs = zip(got, exact, strict=True)
        return Sensitivity(name, rounded, max(float((a - b).norm() / b.norm()) for a, b in pairs))

    rows = [row(name, True, layer) for name, layer in zip(names_of(layers), layers, strict=True)]
    others = steps_of(module)
    rows += [row(name, False, *nodes) for name, nodes in others.items()]
    every = [*layers, *(node for nodes in others.values() for node in nodes)]
    return [
        *rows,
        row("all layers in 8 bits, as in the file", True, *layers),
        row("every step in 8 bits", False, *every),
    ]


def write_sensitivity(program: ExportedProgram, images: Tensor, suffix: str, dynamic: bool, folder: Path) -> None:
    """Writes `sensitivity` as sensitivity.csv and as the figure sensitivity."""
    from linvit.analysis.figures import write_figure
    from linvit.analysis.run_figures import sensitivity_figure

    rows = sensitivity(program, images, suffix, dynamic)
    write_csv(folder / "sensitivity.csv", [{"part": r.name, "in_8_bits": r.rounded, "error": r.error} for r in rows])
    write_figure(sensitivity_figure([(r.name, r.rounded, r.error) for r in rows]), folder / "sensitivity")
