"""`linvit export`."""

import argparse

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_network, chosen, load
from linvit_cli.streams import show

HELP = "Write a file for ONNX, OpenVINO, Core ML or other runtimes."
EXAMPLES = (
    "linvit export runs/ravlt_nano_digits digits.onnx",
    "linvit export --model mavit_tiny --checkpoint mavit_tiny.safetensors mavit_tiny.xml --size 384",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit export (RUN | --model NAME --checkpoint FILE) OUT [options]"
    text = "folder of a run (classifier, segmentor or RetinaNet), or a checkpoint of it; with --model left out"
    command.add_argument("source", metavar="RUN", nargs="?", help=text)
    text = "the file to write: .onnx, .xml (OpenVINO), .pt2 (torch.export), .pte (ExecuTorch) or .mlpackage (Core ML)"
    command.add_argument("target", metavar="OUT", help=text)
    add_network(command.add_argument_group("network without a run"))
    text = "height and width in pixels (default: those of the run)"
    command.add_argument("--size", type=whole, metavar="N", help=text)
    text = "one image of one size (default: any, but one for .pte, .mlpackage and small .pt2)"
    command.add_argument("--fixed", action="store_true", help=text)
    text = ".pt2 with machine code for processors like this one, by AOTInductor; needs a C++ compiler"
    command.add_argument("--compiled", action="store_true", help=text)
    text = "image files or folders to compare the file with the network on (default: two photos)"
    command.add_argument("--images", nargs="+", metavar="FILE", help=text)


def run(options: argparse.Namespace) -> int:
    given = chosen(options, "size", "images") | {"compiled": options.compiled}
    if options.fixed:
        given["dynamic"] = False
    exported = load(options, options.source).export(options.target, **given)
    show(f"{exported.path} is written for {exported.format}.")
    if exported.difference is None:
        show(
            f"{exported.format} does not run on this system, so its outputs were not compared with the network's: run"
            " the same command where it does."
        )
        return 0
    sizes = ", ".join(f"{height}×{width}" for height, width in dict.fromkeys(exported.sizes))
    show(
        f"Its outputs differ from the network's by at most {exported.difference:.2g}; the largest output is"
        f" {exported.largest:.2g} (images of {sizes} px)."
    )
    return 0
