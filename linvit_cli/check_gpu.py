"""`linvit check-gpu`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from linvit_cli.bench import Shown
from linvit_cli.streams import show

if TYPE_CHECKING:
    from linvit.bench.rows import Progress

HELP = "Check the Triton kernels on your GPU, and time them."
EXAMPLES = ("linvit check-gpu",)
WRONG = 1


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit check-gpu [options]"
    text = "where the page and the benchmarks go"
    command.add_argument("--folder", type=Path, metavar="FOLDER", default=Path("runs/check_gpu"), help=text)
    command.add_argument("--no-bench", action="store_true", help="check only; one core compiles for 7 minutes")


def run(options: argparse.Namespace) -> int:
    from linvit.bench.gpu import FAILED, PAGE, PASSED, check_gpu

    shown = Shown()
    try:
        done = check_gpu(options.folder, cast("Progress", shown), benchmarks=not options.no_bench)
    finally:
        shown.clear()
    failures = [check for check in done if check.failure is not None]
    for check in failures:
        show(f"{check.case}: {check.failure}")
    show(f"{len(done) - len(failures)} of {len(done)} cases passed. {FAILED if failures else PASSED}")
    show(f"Page: {options.folder / PAGE}")
    return WRONG if failures else 0
