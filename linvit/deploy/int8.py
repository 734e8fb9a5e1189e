"""Programs in 8 bits, calibrated on images: convolutions and products with weights, and nothing else.

torchao inserts the roundings, in the form that the runtimes replace by their own 8-bit layers. The products without
weights (state, scores), κ, α, divisions and norms stay in float32, as does a depthwise convolution whose output any
other step reads than an 8-bit layer: it would gain little, and a residual stream would be rounded in every block.
"""

import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Interpreter, Node

from linvit.deploy.graph import exported
from linvit.deploy.runtimes import silent_stderr
from linvit.errors import SettingError
from linvit.files import write_csv

aten = torch.ops.aten
CONVOLUTIONS = (aten.conv2d.default, aten.conv2d.padding)
LAYERS = (*CONVOLUTIONS, aten.linear.default)
GROUPS = 6  # the place of this argument of a convolution
AT_ONCE = 8  # images of a calibration, if the program takes several
STEPS = {
    "matmul": "products without weights (state, scores)",
    "softmax": "softmax (α, scores)",
    "exp": "exp (κ)",
    "relu": "max(x, 0) (κ)",
    "div": "divisions",
    "mean": "means (norms, keys)",
    "rsqrt": "inverse roots (norms)",
    "mul": "products by element (norms, rotation, gate)",
    "add": "sums (residuals)",
    "gelu": "GELU",
}
"""The words for operators of torch that stay in float32; the others have no rows of their own."""


@dataclass(frozen=True)
class Rounding:
    """How a runtime wants its 8-bit layers.

    activations: the type of what a layer reads. outputs: whether its result is rounded too. ONNX Runtime and XNNPACK
    compute a layer in 8 bits only if it is; OpenVINO is faster, and more exact, if it is not.
    """

    activations: torch.dtype
    outputs: bool


ROUNDINGS = {
    ".onnx": Rounding(torch.uint8, outputs=True),
    ".xml": Rounding(torch.uint8, outputs=False),
    ".pte": Rounding(torch.int8, outputs=True),
}
"""The formats with 8-bit layers, by the suffix of their files."""


def need_int8(suffix: str) -> None:
    """Raises ValueError for a format without 8-bit layers, and ImportError if torchao is missing."""
    if suffix not in ROUNDINGS:
        raise SettingError(f"Files of {suffix} cannot be in 8 bits, expected {', '.join(ROUNDINGS)}: leave `int8` out.")
    if find_spec("torchao") is None:
        raise ImportError("Files in 8 bits need torchao: install it with `pip install 'linvit[int8]'`.")


def quantized(
    program: ExportedProgram, images: Tensor, suffix: str, dynamic: bool, every_step: bool = False
) -> ExportedProgram:
    """The program with 8-bit layers, which are float layers between roundings; same inputs and outputs.

    program: reads images like these, as many at a time as it was exported with, or any number if `dynamic`. images: to
    take the ranges of activations from. suffix: of the files to write, a key of ROUNDINGS. every_step: also round what
    `steps_of` returns, inside the attention and around it; only to measure what that loses.
    """
    need_int8(suffix)
    with silent_stderr():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    (sample,), _ = program.example_inputs
    batches = images.clone().split(AT_ONCE if dynamic else len(sample))
    with torch.inference_mode(False), torch.no_grad():
        module = equalized(program.module(check_guards=False), batches)
        observed = prepare_pt2e(module, annotator(ROUNDINGS[suffix], every_step))
        for batch in batches:
            observed(batch)
        module = convert_pt2e(observed)
    return exported(module, sample, dynamic)


def layers_of(module: GraphModule) -> list[Node]:
    """The convolutions and products with weights that are computed in 8 bits."""
    weighted = [node for node in module.graph.nodes if node.target in LAYERS and node.args[1].op == "get_attr"]
    dense = {node for node in weighted if node.target not in CONVOLUTIONS or _groups(node) == 1}
    return [node for node in weighted if node in dense or dense.issuperset(node.users)]


def equalized(module: GraphModule, batches: Sequence[Tensor]) -> GraphModule:
    """The module with scaled channels before every dense convolution that reads a concatenation; same outputs.

    What is concatenated in CARE differs thirtyfold in range, and the batch norm that evens it out is folded into the
    weights, so that one scale for all channels rounds most of them away. Each channel is divided by a factor by which
    its weights are multiplied, after which both have the same range (Nagel et al., Data-Free Quantization Through
    Weight Equalization and Bias Correction, ICCV 2019).

    batches: images to take the ranges from.
    """
    dense = [node for node in layers_of(module) if node.target in CONVOLUTIONS and _groups(node) == 1]
    layers = [node for node in dense if node.all_input_nodes[0].target == aten.cat.default]
    if not layers:
        return module
    ranges = _Ranges(module, [layer.all_input_nodes[0] for layer in layers])
    for batch in batches:
        ranges.run(batch, enable_io_processing=True)
    for number, layer in enumerate(layers):
        value, weight = layer.all_input_nodes[:2]
        owner, _, name = str(weight.target).rpartition(".")
        values: Tensor = getattr(module.get_submodule(owner), name)
        read, weighed = ranges.largest[value], values.abs().amax((0, 2, 3))
        used = (read > 0) & (weighed > 0)
        factors = torch.where(used, (read / weighed).sqrt(), 1.0)[:, None, None]
        setattr(module.get_submodule(owner), name, nn.Parameter(values * factors, requires_grad=False))
        module.register_buffer(f"factors{number}", 1 / factors)
        with module.graph.inserting_before(layer):
            scales = module.graph.get_attr(f"factors{number}")
            scales.meta["val"] = factors
            scaled = module.graph.call_function(aten.mul.Tensor, (value, scales))
            scaled.meta["val"] = value.meta["val"]
        layer.replace_input_with(value, scaled)
    module.recompile()
    return module


class _Ranges(Interpreter):
    """Runs a program and remembers the largest value, regardless of sign, of every channel of some tensors."""

    def __init__(self, module: GraphModule, nodes: Sequence[Node]) -> None:
        super().__init__(module)
        self.nodes = set(nodes)
        self.largest: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n in self.nodes:
            largest = result.abs().amax((0, 2, 3))
            self.largest[n] = torch.maximum(largest, self.largest.get(n, largest))
        return result


def steps_of(module: GraphModule) -> dict[str, list[Node]]:
    """The steps on floats that stay in float32, by the words for their kind; others than these are not rounded."""
    layers = set(layers_of(module))
    steps: dict[str, list[Node]] = {}
    for node in module.graph.nodes:
        name = str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")
        if node.target in CONVOLUTIONS and node not in layers:
            steps.setdefault("other depthwise convolutions", []).append(node)
        elif node.op == "call_function" and name in STEPS and _is_float(node):
            steps.setdefault(STEPS[name], []).append(node)
    return steps


def _is_float(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.is_floating_point()


def _groups(convolution: Node) -> Any:
    return convolution.args[GROUPS] if len(convolution.args) > GROUPS else 1


def specifications(activations: torch.dtype) -> tuple[Any, Any]:
    """torchao's words for activations, with one scale and zero point each, and weights, with a scale per channel."""
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    def of(dtype: torch.dtype, lowest: int, observer: Callable[..., Any], scheme: Any, **more: Any) -> Any:
        limits = {"quant_min": lowest, "quant_max": torch.iinfo(dtype).max}
        return QuantizationSpec(dtype, observer, qscheme=scheme, **limits, **more)

    lowest = torch.iinfo(activations).min
    return (
        of(activations, lowest, MinMaxObserver, torch.per_tensor_affine),
        of(torch.int8, -127, PerChannelMinMaxObserver, torch.per_channel_symmetric, ch_axis=0),
    )


def annotator(rounding: Rounding, every_step: bool = False) -> Any:
    """What tells torchao which tensors to round: those of `layers_of`, and with every_step of `steps_of`."""
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, Quantizer

    class Layers(Quantizer):
        def annotate(self, model: GraphModule) -> GraphModule:
            activation, weight = specifications(rounding.activations)
            for node in layers_of(model):
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: activation, node.args[1]: weight},
                    output_qspec=activation if rounding.outputs else None,
                    _annotated=True,
                )
            for node in itertools.chain(*steps_of(model).values()) if every_step else ():
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    input_qspec_map={each: activation for each in node.all_input_nodes if _is_float(each)},
                    output_qspec=activation,
                    _annotated=True,
                )
            return model

        def validate(self, model: GraphModule) -> None:
            pass

    return Layers()


def names_of(nodes: Sequence[Node]) -> list[str]:
    """The layers' names in the network, from those of their weights."""
    return [str(node.args[1].target).removeprefix("network.").removesuffix(".weight") for node in nodes]  # type: ignore[union-attr]


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

    images: to measure and calibrate on; the first 16 are used, or one if the program is not `dynamic`. suffix: of the
    file, whose runtime decides how layers are rounded.
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
