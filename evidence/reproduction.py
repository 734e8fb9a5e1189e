"""The networks of a published table, trained and evaluated in turn, each beside its published values.

Every network is a process of `linvit train --resume` with a log of its own, and then one of `linvit eval` on its last
checkpoint, so that the same command goes on after an interruption, and one network that fails does not stop the others.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evidence.reproduce import Row, hours_by_gpu, recipe_rows
from linvit.analysis.markdown import markdown_rows
from linvit.files import LAST, write_csv, write_json, write_text
from linvit.runs.folder import ENVIRONMENT, RECIPE, RunStoppedError, read_curves
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe
from linvit_cli.failures import STOPPED
from linvit_cli.parser import whole

OPTIONS = {"ImageNet-1k": "imagenet", "COCO 2017": "coco", "ADE20K": "ade20k"}
EVALUATION = "evaluation.json"  # in a run's folder: what `linvit eval` has measured
PAGE = "docs/evidence/reproduce.md"
KEYS = {"top-1": "top1", "mIoU": "miou", "AP50": "box_ap50", "AP75": "box_ap75"} | {  # published quantity → measure
    **{f"{shape} AP{iou}": f"{shape}_ap{iou}" for shape in ("box", "mask") for iou in ("", "50", "75")},
    **{size: f"box_ap_{size}" for size in ("small", "medium", "large")},
}
ABOUT = """Accuracies in %, on the validation images after the last epoch; *of the average* is that of the moving
average of the weights. GPU hours and images per second include the evaluations during training."""


class Network(NamedTuple):
    """A row of the table. words: of `linvit`, that train it."""

    row: Row
    folder: Path
    root: Path
    words: tuple[str, ...]

    @property
    def evaluation(self) -> Path:
        return self.folder / EVALUATION

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", metavar="TABLE", help=f'such as "RALA, Table 3"; {PAGE} has all of them')
    for data, option in OPTIONS.items():
        parser.add_argument(f"--{option}", type=Path, metavar="FOLDER", help=f"the folder of {data}")
    text = "ImageNet weights of the authors, such as RAVLT_T.pth, for dense tasks (default: runs of this command)"
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="gets runs and the table")
    parser.add_argument("--devices", type=whole, metavar="N", help="GPUs (default: as many as the paper)")
    parser.add_argument("--set", nargs="+", default=[], metavar="key=value", help="settings of every recipe")
    parser.add_argument("--dry", action="store_true", help="only print rows, commands and hours")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Trains and evaluates what is left, and writes the table after every network; Ctrl-C stops after a checkpoint."""
    networks, failures = [*plan(rows_of(options.table), options)], []
    if options.dry:
        for row, *_, words in networks:
            print(f"{row.name}: {row.published}; {row.cost}\n    linvit {' '.join(words)}")
        hours = hours_by_gpu(network.row.cost for network in networks)
        print("Together:", ", ".join(f"{sum(listed):,.0f} {gpu} hours" for gpu, listed in hours.items()))
        return
    check(networks)
    for network in networks:
        try:
            if not network.evaluation.exists():
                print(f"{network.row.name}: {network.row.cost}; log in {network.log}", flush=True)
                train(network)
                evaluate(network)
        except subprocess.CalledProcessError:
            *_, last = network.log.read_text().splitlines() or ["no message"]
            failures.append(f"{network.row.name}: {last}")
        finally:
            page = write_table(options.table, networks, options.runs)
    print(f"The table is {page}.")
    if failures:
        raise ValueError("\n".join(["not every network was trained.", *failures]))


def rows_of(table: str) -> list[Row]:
    """Its rows; ValueError if it has no recipes, or trains on other data than images."""
    every = recipe_rows()
    rows = [row for row in every if row.table == table]
    if not rows:
        known = "; ".join(dict.fromkeys(row.table for row in every if row.data in OPTIONS))
        raise ValueError(f"There are no recipes for {table!r}, expected one of {known}.")
    if other := next((row.data for row in rows if row.data not in OPTIONS), None):
        raise ValueError(
            f"{table} is trained on {other}, which this command does not prepare: {PAGE} has its commands."
        )
    return rows


def plan(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[Network]:
    """The networks with their commands; ValueError if data or weights to start from are missing."""
    for data in dict.fromkeys(row.data for row in rows):
        folder = getattr(options, OPTIONS[data])
        if not options.dry and not (folder and folder.is_dir()):
            problem = f"the folder {folder} does not exist" if folder else "no folder was given for it"
            raise ValueError(f"{rows[0].table} needs {data}, but {problem}: set --{OPTIONS[data]}.")
    if options.weights and not options.dry and not options.weights.is_dir():
        raise ValueError(f"The folder {options.weights} does not exist: correct --weights, or leave it out.")
    missing, planned = dict[Path, None](), set()
    for row in rows:
        values = read_recipe(row.recipe)
        folder = options.runs / Path(values["folder"]).name
        root = getattr(options, OPTIONS[row.data]) or Path("/data") / OPTIONS[row.data]
        [paper] = re.findall(r"trainer\.devices=(\d+)", row.command)
        devices = paper if options.devices is None else options.devices
        words = ["train", row.recipe, "--resume", f"folder={folder}", f"data.root={root}", f"trainer.devices={devices}"]
        if init := first_weights(row, values, options):
            words.append(f"init={init}")
            if not (init.is_file() or (init / EVALUATION).exists() or init in planned):
                missing[init] = None
        planned.add(folder)
        yield Network(row, folder, root, (*words, *options.set))
    if missing and not options.dry:
        raise ValueError(
            f"{rows[0].table} starts from ImageNet weights that are not there ({', '.join(map(str, missing))}): give"
            f" the folder of the authors' as --weights, or train the networks by this command into {options.runs}."
        )


def first_weights(row: Row, values: dict[str, Any], options: argparse.Namespace) -> Path | None:
    """What a detector or segmentor starts from: the authors' file in --weights, else a run of its backbone."""
    authors = re.search(r"\binit=(\S+)", row.command)
    if authors and options.weights and (options.weights / authors[1]).is_file():
        return options.weights / authors[1]
    run = f"{values['model']['backbone']}_imagenet_300e" if authors else values.get("init")
    return options.runs / Path(run).name if run else None


def check(networks: Sequence[Network]) -> None:
    """Raises ValueError for settings, GPUs and data that cannot be used, before anything is trained."""
    sources = {}
    for network in networks:
        _, name, _, *settings = network.words
        recipe = Recipe(read_recipe(name, settings))
        recipe.check_machine()
        sources[network.root] = recipe
    for recipe in sources.values():
        source = recipe.source()
        source.train_set()
        source.val_set()


def train(network: Network) -> None:
    """Raises CalledProcessError if it fails, and RunStoppedError if it was stopped."""
    network.folder.parent.mkdir(parents=True, exist_ok=True)
    with network.log.open("a") as log:
        command = [sys.executable, "-m", "linvit_cli", *network.words]
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:  # the training gets it too, and writes a checkpoint
                process.wait()
                code = STOPPED
    if code == STOPPED:
        raise RunStoppedError("Stopped; the same command goes on.")
    if code:
        raise subprocess.CalledProcessError(code, command)


def evaluate(network: Network) -> None:
    """Writes the measures of the last checkpoint into the run's folder."""
    last = network.folder / "checkpoints" / LAST
    command = [sys.executable, "-m", "linvit_cli", "eval", str(last), "--json", f"data.root={network.root}"]
    with network.log.open("a") as log:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=True)
    write_json(network.evaluation, json.loads(result.stdout), indent=1)


def write_table(table: str, networks: Sequence[Network], folder: Path) -> Path:
    """Writes TABLE.md and .csv, with what there is so far, and returns the first."""
    lines = [line for network in networks for line in lines_of(network)]
    page = folder / f"{re.sub(r'[^a-z0-9]+', '-', table.lower())}.md"
    write_csv(page.with_suffix(".csv"), lines)
    write_text(page, f"# {table}\n\n{ABOUT}\n\n{markdown_rows(lines, left=4)}\n")
    return page


def lines_of(network: Network) -> Iterator[dict[str, str]]:
    """A line for each published value, or one for the accuracy if the paper's number is not known."""
    measured = json.loads(network.evaluation.read_text()) if network.evaluation.exists() else {}
    cells = [cell.removesuffix(" %").rpartition(" ") for cell in network.row.published.split(", ")]
    values = {name: value for name, _, value in cells if name in KEYS} or {"top-1": "–"}
    for quantity, value in values.items():
        key = KEYS[quantity]
        ours = {kind: f"{100 * by_name[key]:.1f}" for kind, by_name in measured.items() if key in by_name}
        line = {"network": network.row.name, "recipe": network.row.recipe, "measure": quantity, "published": value}
        yield line | {"ours": ours.get("raw", "–"), "of the average": ours.get("ema", "–")} | facts_of(network.folder)


def facts_of(folder: Path) -> dict[str, str]:
    """State, cost and origin of a run, from what its training has written."""
    curves = read_curves(folder)
    if not curves:
        return dict.fromkeys(("epochs", "GPU hours", "images/s", "GPUs", "commit"), "–")
    recipe, about = read_recipe(folder / RECIPE), json.loads((folder / ENVIRONMENT).read_text())[-1]
    seconds, count = sum(epoch["seconds"] for epoch in curves), about["processes"]
    batch = recipe["data"]["batch_size"] * count * recipe["trainer"].get("accumulate_grad_batches", 1)
    return {
        "epochs": f"{len(curves)} of {recipe['trainer']['max_epochs']}",
        "GPU hours": f"{seconds * count / 3600:.2f}",
        "images/s": f"{curves[-1]['step'] * batch / seconds:.0f}",
        "GPUs": f"{count} × {about['devices'][0]}",
        "commit": (about["commit"] or "unknown")[:12],
    }
