"""`linvit export`."""

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_network, chosen, load
from linvit_cli.streams import show

if TYPE_CHECKING:
    from linvit.deploy import Exported

HELP = "Write a file for ONNX, OpenVINO, Core ML or other runtimes."
EXAMPLES = (
    "linvit export runs/ravlt_nano_digits digits.onnx",
    "linvit export runs/stdlib_bytes_rala decoder.onnx",
    "linvit export --model mavit_tiny --checkpoint mavit_tiny.safetensors mavit_tiny.xml --size 384",
    "linvit export runs/ravlt_nano_digits digits.onnx --int8 --calibrate photos/ --report sensitivity/",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit export (RUN | --model NAME --checkpoint FILE) OUT [options]"
    text = "folder of a run (not of image generation), or a checkpoint of it; with --model left out"
    command.add_argument("source", metavar="RUN", nargs="?", help=text)
    text = "the file to write: .onnx, .xml (OpenVINO), .pt2 (torch.export), .pte (ExecuTorch) or .mlpackage (Core ML)"
    command.add_argument("target", metavar="OUT", help=text)
    add_network(command.add_argument_group("network without a run"))
    text = "height and width in pixels (default: those of the run)"
    command.add_argument("--size", type=whole, metavar="N", help=text)
    text = (
        "one image of one size, or one token (default: any, but one for most ViTs of timm, Mask R-CNN, .pte,"
        " .mlpackage, small .pt2)"
    )
    command.add_argument("--fixed", dest="dynamic", action="store_const", const=False, help=text)
    text = ".pt2 with machine code for processors like this one, by AOTInductor; needs a C++ compiler"
    command.add_argument("--compiled", action="store_true", help=text)
    text = "opset version of an .onnx file, 18 or higher, for older runtimes (default: torch's choice)"
    command.add_argument("--opset", type=whole, metavar="N", help=text)
    text = "image files or folders to compare the file with the network on (default: two photos)"
    command.add_argument("--images", nargs="+", metavar="FILE", help=text)
    group = command.add_argument_group("8 bits")
    text = "compute convolutions and products with weights in 8 bits; .onnx, .xml and .pte (default: float32)"
    group.add_argument("--int8", action="store_true", help=text)
    text = "with --int8: image files or folders to calibrate on, 16 images or more (default: none)"
    group.add_argument("--calibrate", nargs="+", metavar="FILE", help=text)
    text = "with --int8: folder for a table and a figure of each layer's sensitivity to 8 bits (default: none)"
    group.add_argument("--report", metavar="FOLDER", help=text)


def run(options: argparse.Namespace) -> int:
    settings = chosen(options, "size", "dynamic", "opset", "images", "calibrate", "report")
    settings |= {"compiled": options.compiled, "int8": options.int8}
    exported = load(options, options.source).export(options.target, **settings)
    for sentence in _sentences(exported):
        show(sentence)
    if options.report is not None:
        show(f"The sensitivity of the layers to 8 bits is in {options.report}.")
    return 0


def _sentences(exported: "Exported") -> Iterator[str]:
    count = exported.facts.calibrated
    in_8_bits = f" in 8 bits, calibrated on {count} images" if count else ""
    yield f"{exported.path} is written for {exported.format}{in_8_bits}."
    if exported.difference is None:
        yield (
            f"{exported.format} does not run on this system, so its outputs were not compared with the network's: run"
            " the same command where it does."
        )
        return
    error = f"{exported.error:.1%} (root mean square), " if count else ""
    sizes = ", ".join("×".join(map(str, size)) for size in dict.fromkeys(exported.sizes))
    compared = {"language": f"texts of {sizes} tokens", "speech": f"features of {sizes} frames"}
    yield (
        f"Its outputs differ from the network's by {error}at most {exported.difference:.2g}; the largest output is"
        f" {exported.largest:.2g} ({compared.get(exported.facts.task, f'images of {sizes} px')})."
    )
    if exported.facts.task == "detection" and exported.same is not None:
        yield f"Of the detections, {exported.same:.1%} are those of the network."
    if count and exported.same is not None:
        yield f"The class with the largest logit is the same in {exported.same:.1%}; linvit eval measures the accuracy."
