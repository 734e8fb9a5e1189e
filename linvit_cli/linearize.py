"""`linvit linearize`."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from linvit_cli.parser import number, whole
from linvit_cli.run_arguments import chosen
from linvit_cli.streams import show

if TYPE_CHECKING:
    from linvit.runs import Run

HELP = "Turn a trained softmax network into a linear one, or plan it."
EXAMPLES = (
    "linvit linearize linearize/cifar/align linearize/cifar/transfer linearize/cifar/tune",
    "linvit linearize linearize/cifar/align --plan --size 128 --budget 40",
)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.usage = "linvit linearize RECIPE ... [options]"
    steps = command.add_argument_group("steps")
    text = "recipes, trained in turn, each from the weights of the one before; complete ones are kept"
    steps.add_argument("recipes", metavar="RECIPE", nargs="+", type=Path, help=text)
    text = "settings for every recipe, such as trainer.max_epochs=5 (default: those of the recipes)"
    steps.add_argument("--set", metavar="KEY=V", nargs="+", action="extend", default=[], help=text)
    text = "let the recipes run code of any package and write outside their runs' folders"
    steps.add_argument("--trust-recipe", action="store_true", help=text)
    plan = command.add_argument_group("plan")
    text = "after the last recipe, an alignment, measure error and time of each block and propose patterns"
    plan.add_argument("--plan", action="store_true", help=text)
    text = "height and width in pixels at which times are measured (default: those of the recipe)"
    plan.add_argument("--size", metavar="N", type=whole, help=text)
    text = "choose the pattern of least error that takes at most this long for a batch (default: choose none)"
    plan.add_argument("--budget", metavar="MS", type=number, help=text)
    plan.add_argument("--images", metavar="N", type=whole, default=256, help="held-out images for the errors")
    plan.add_argument("--batch", metavar="N", type=whole, default=1, help="images per call when times are measured")
    plan.add_argument("--threads", metavar="N", type=whole, default=1, help="threads when times are measured")
    text = "where times are measured, on a GPU (cuda) in bfloat16 (default: cpu)"
    plan.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=text)
    text = "folder for report.html, plan.md, plan.json and the figure (default: plan in the run's folder)"
    plan.add_argument("--output", metavar="FOLDER", type=Path, help=text)
    text = "also put tables and figure between the marks of a Markdown file that are named after FOLDER (default: none)"
    plan.add_argument("--write", metavar="FILE", type=Path, help=text)


def run(options: argparse.Namespace) -> int:
    from lightning.pytorch.utilities import rank_zero_only

    from linvit.bench.machine import check_device
    from linvit.runs import train_in_turn

    if options.plan:
        check_device(options.device)  # before hours of training
    trained = train_in_turn(options.recipes, options.set, progress=True, trust_recipe=options.trust_recipe)
    rank_zero_only(show)(f"The last run is {trained.folder}.")
    if options.plan:
        rank_zero_only(_plan)(trained, options)
    return 0


def _plan(trained: "Run", options: argparse.Namespace) -> None:
    from linvit.studies import plan_linearization
    from linvit_cli.streams import show_rows

    folder = options.output or trained.folder / "plan"
    settings = chosen(options, "size", "budget")
    settings |= {name: getattr(options, name) for name in ("images", "batch", "threads", "device", "write")}
    plan = plan_linearization(trained, output=folder, progress=show, **settings)
    show_rows([proposal.cells() for proposal in plan.proposals])
    if plan.advice:
        show(plan.advice)
    show(f"Page: {folder}/report.html; the figure is {folder}/plan.svg, .png and .pdf.")
