"""Arguments and runner of `linvit bench`."""

import argparse
from pathlib import Path

from linvit.cli.run_arguments import add_keep_memory, set_allocator

INFINITE = float("inf")


def bench_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit bench (op | model | train) [NAME ...] [options]; linvit bench op --help lists them"
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND", prog="linvit bench")
    for name, (add_arguments, text) in KINDS.items():
        kind = kinds.add_parser(name, help=text, description=text, allow_abbrev=False)
        add_arguments(kind)
        _common_arguments(kind)


def run_bench(options: argparse.Namespace) -> int:
    from linvit.cli.bench import run

    set_allocator(options)
    return run(options)


def image_size(text: str) -> tuple[int, int]:
    """224 or 1024x2048 (height × width) as (height, width)."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is no size: expected a side such as 224, or 1024x2048")
    return int(sides[0]), int(sides[-1])


def _common_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: events and CUDA graphs (cpu)")
    kind.add_argument("--threads", type=_positive, default=1, help="1 is timed in CPU time, more on the wall (1)")
    kind.add_argument("--rounds", type=_positive, help="how often every variant is timed, in turn")
    kind.add_argument("--seconds", type=float, default=INFINITE, help="fewer rounds, but three, where they take longer")
    kind.add_argument("--memory", action="store_true", help="measure the peak memory of every variant too")
    add_keep_memory(kind)
    kind.add_argument("--seed", type=int, default=0, help="what inputs are drawn from (0)")
    kind.add_argument("--json", action="store_true", help="print everything as one JSON object in a last line")
    kind.add_argument("--output", type=Path, metavar="FOLDER", help="where bench.json and the plots go")
    text = "put table and plots between the marks of --output's name in a .md file"
    kind.add_argument("--write", type=Path, metavar="FILE", help=text)


def _op_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="OPERATOR", nargs="*", help="such as rala (rala mala linear)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="plain compiled cpp triton reference sdpa")
    kind.add_argument("--dtypes", nargs="+", default=("float32",), metavar="DTYPE", help="float32 bfloat16 float16")
    kind.add_argument(
        "--tokens", nargs="+", type=_positive, default=(49, 196, 784, 3136, 12544, 50176), metavar="N", help="how many"
    )
    kind.add_argument("--batch", type=_positive, default=1, help="(1)")
    kind.add_argument("--heads", type=_positive, default=4, help="(4)")
    kind.add_argument("--width", type=_positive, default=64, help="channels of a head (64)")
    kind.add_argument("--backward", action="store_true", help="time forward and backward together")
    kind.add_argument(
        "--layout",
        default="heads",
        help="how inputs lie in memory: heads, tokens, map, or own: as each gets them (heads)",
    )
    kind.add_argument("--sdpa-tokens", type=int, default=12544, metavar="N", help="no softmax beyond so many (12544)")


def _model_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="NETWORK", nargs="*", help="ours (ravlt_tiny mavit_tiny care_s0)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="of ours, such as plain reference fused+bf16")
    kind.add_argument("--peers", nargs="*", metavar="NETWORK", help="of timm, measured beside (six of them)")
    kind.add_argument("--peer-variants", nargs="+", metavar="VARIANT", default=("plain", "fused"), help="plain fused")
    kind.add_argument(
        "--sizes", nargs="+", type=image_size, default=((224, 224),), metavar="SIZE", help="224 or 1024x2048 … (224)"
    )
    kind.add_argument("--batch", nargs="+", type=_positive, default=(1,), metavar="N", help="one or several (1)")


def _train_arguments(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("names", metavar="NETWORK", nargs="*", help="(ravlt_tiny mavit_tiny care_s0)")
    kind.add_argument("--variants", nargs="+", metavar="VARIANT", help="such as plain reference channels_last+bf16")
    kind.add_argument("--size", type=image_size, default=(224, 224), metavar="SIZE", help="224 or 1024x2048 … (224)")
    kind.add_argument("--batch", type=int, default=4, metavar="N", help="(4)")
    kind.add_argument("--curves", type=int, default=0, metavar="STEPS", help="compare loss curves of so many steps")
    kind.add_argument("--curve-size", type=image_size, default=(64, 64), metavar="SIZE", help="of their images (64)")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number: expected 1 or more")
    return int(text)


KINDS = {
    "op": (_op_arguments, "Time the operator over token counts, against softmax and the released order."),
    "model": (_model_arguments, "Time whole networks in every variant next to named peers."),
    "train": (_train_arguments, "Time training steps and compare their loss curves."),
}
