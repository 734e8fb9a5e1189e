"""`linvit export`."""

import argparse

from linvit_cli.parser import whole
from linvit_cli.run_arguments import add_network, chosen, load
from linvit_cli.streams import show

HELP = "Write a file for ONNX Runtime, OpenVINO, ExecuTorch or torch.export."
EXAMPLES = (
    "linvit export runs/ravlt_nano_digits digits.onnx",
    "linvit export --model mavit_tiny --checkpoint mavit_tiny.safetensors mavit_tiny.xml --size 384",
    "linvit export runs/ravlt_nano_digits digits.onnx --int8 --calibrate photos/ --report sensitivity/",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit export (RUN | --model NAME --checkpoint FILE) OUT [options]"
    text = "folder of a run (classifier, segmentor or RetinaNet), or a checkpoint of it; with --model left out"
    command.add_argument("source", metavar="RUN", nargs="?", help=text)
    text = "the file to write: .onnx, .xml (OpenVINO), .pt2 (torch.export) or .pte (ExecuTorch)"
    command.add_argument("target", metavar="OUT", help=text)
    add_network(command.add_argument_group("network without a run"))
    text = "height and width in pixels (default: those of the run)"
    command.add_argument("--size", type=whole, metavar="N", help=text)
    text = "one image of one size (default: any, but one for .pte and small .pt2)"
    command.add_argument("--fixed", action="store_true", help=text)
    text = "image files or folders to compare the file with the network on (default: two photos)"
    command.add_argument("--images", nargs="+", metavar="FILE", help=text)
    group = command.add_argument_group("8 bits")
    text = "compute convolutions and products with weights in 8 bits; .onnx and .xml (default: float32)"
    group.add_argument("--int8", action="store_true", help=text)
    text = "with --int8: image files or folders to calibrate on, 16 images or more (default: none)"
    group.add_argument("--calibrate", nargs="+", metavar="FILE", help=text)
    text = "with --int8: folder for a table and a figure of each layer's sensitivity to 8 bits (default: none)"
    group.add_argument("--report", metavar="FOLDER", help=text)


def run(options: argparse.Namespace) -> int:
    choices = chosen(options, "size", "images", "calibrate", "report")
    choices |= {"dynamic": False} if options.fixed else {}
    exported = load(options, options.source).export(options.target, int8=options.int8, **choices)
    sizes = ", ".join(f"{height}×{width}" for height, width in dict.fromkeys(exported.sizes))
    count = exported.facts.calibrated
    show(
        f"{exported.path} is written for {exported.format}{f' in 8 bits, calibrated on {count} images' * (count > 0)}."
    )
    difference = f"{exported.error:.1%} (root mean square), " if count else ""
    show(
        f"Its outputs differ from the network's by {difference}at most {exported.difference:.2g}; the largest output is"
        f" {exported.largest:.2g} (images of {sizes} px)."
    )
    if count and exported.same is not None:
        show(f"The class with the largest logit is the same in {exported.same:.1%}; linvit eval measures the accuracy.")
    if options.report is not None:
        show(f"The sensitivity of the layers to 8 bits is in {options.report}.")
    return 0
