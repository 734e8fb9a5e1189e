"""`linvit demo`: three families and a softmax twin learn to read real handwritten digits; one table, one page."""

import csv
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from linvit.analysis import figures
from linvit.analysis.cost import count_cost
from linvit.analysis.figures import Trained
from linvit.analysis.report import paragraph, picture, table, write_page
from linvit.files import replacing
from linvit.runs.restore import Restored, restore, source_for
from linvit.runs.training import train
from linvit.tasks.checkpoints import LAST

RESULTS, PAGE = "results.json", "report.html"
SHOWN_IMAGES = 5
SPECTRUM_IMAGES = 64
ABOUT = """Same seed, same budget of {epochs} epochs, {height}×{width} px. The data are the 1,797 handwritten digits
that ship with scikit-learn; accuracy is on the {count} held out, after the last epoch. A pattern has one
letter a stage: L linear attention, S softmax attention, C strip convolutions. MACs count convolutions
and linear layers, as the papers do; the products inside the attention come on top. Images a second:
inference, batches of 64, {threads} CPU threads, float32. Differences of a few images between networks of
this size say nothing about the mechanisms."""
ABOUT_SCORES = """One query's row of the score matrix in each network's first attention, mean over heads; red positive,
blue negative, each map on its own scale. Under each name: the grid of tokens."""
ABOUT_SPECTRUM = """Tokens × head width, for each image and head, over the largest; mean over {count} images and all
heads, before the local term and the modulation. A fast fall means outputs of low rank."""


def demo(recipes: Path, folder: Path) -> None:
    """Train every recipe in a folder, each where it left off, and write results.json and report.html.

    Args:
        recipes: the folder of recipes; they must share their data.
        folder: where the runs, the results and the page go.

    Raises:
        ValueError: if there are no recipes.
    """
    found = sorted(recipes.glob("*_nano_digits.yaml"))
    if not found:
        raise ValueError(
            f"The folder {recipes} holds no recipes: run the demo from a checkout, or name it with --recipes."
        )
    if (folder / RESULTS).is_file() and (folder / PAGE).is_file():
        _show(json.loads((folder / RESULTS).read_text()))
        print(f"Done already: {folder / PAGE} is the page to look at; delete {folder} to start over.")
        return
    runs = [_train(recipe, folder / recipe.stem, number, len(found)) for number, recipe in enumerate(found, start=1)]
    restored = [restore(run / "checkpoints" / LAST) for run in runs]
    source = source_for(restored[0], None)
    images, targets = (torch.stack(part) for part in zip(*map(_pair, source.val_set()), strict=True))
    trained = [_trained(run, one, images) for run, one in zip(runs, restored, strict=True)]
    speeds = _images_per_second([one.network for one in trained], images[:64])
    rows = [_row(one, targets, images, speed) for one, speed in zip(trained, speeds, strict=True)]
    _show(rows)
    _write_report(folder / PAGE, rows, trained, images, targets, source.class_names)
    with replacing(folder / RESULTS) as temporary:
        temporary.write_text(json.dumps(rows, indent=1))
    print(f"{folder / PAGE} is the page to look at.")


def _train(recipe: Path, run: Path, number: int, total: int) -> Path:
    print(f"[{number}/{total}] {recipe.stem}", flush=True)
    return train(recipe, [f"folder={run}"], resume=True)


def _pair(item: tuple[Tensor, Any]) -> tuple[Tensor, Tensor]:
    image, target = item
    return image, torch.as_tensor(target)


def _trained(run: Path, restored: Restored, images: Tensor) -> Trained:
    with (run / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    network = restored.task.networks()["raw"].eval()
    with torch.no_grad():
        predictions = torch.cat([network(batch).argmax(-1) for batch in images.split(64)])
    return Trained(
        name=run.name.removesuffix("_digits"),
        network=network,
        epochs=[int(row["epoch"]) for row in rows],
        losses=[float(row["train_loss"]) for row in rows],
        accuracies=[100 * float(row["top1"]) for row in rows],
        predictions=predictions,
    )


@torch.no_grad()
def _images_per_second(networks: Sequence[nn.Module], images: Tensor, rounds: int = 9) -> list[float]:
    """Median over interleaved rounds, so that whatever else the machine does falls on all alike."""
    seconds: list[list[float]] = [[] for _ in networks]
    for number in range(rounds + 1):
        for network, own in zip(networks, seconds, strict=True):
            start = time.perf_counter()
            network(images)
            if number:  # the first round warms up
                own.append(time.perf_counter() - start)
    return [len(images) / statistics.median(own) for own in seconds]


def _row(one: Trained, targets: Tensor, images: Tensor, speed: float) -> dict[str, Any]:
    cost = count_cost(one.network, tuple(images.shape[1:]))
    return {
        "model": one.name,
        "pattern": one.network.pattern,
        "top1": (one.predictions == targets).double().mean().item(),
        "images": len(targets),
        "parameters": cost.parameters,
        "macs": cost.macs,
        "macs_attention": cost.macs_attention,
        "images_per_second": speed,
    }


def _cells(row: dict[str, Any]) -> dict[str, str]:
    return {
        "model": row["model"],
        "pattern": row["pattern"],
        "accuracy": f"{100 * row['top1']:.2f} %",
        "wrong": f"{round((1 - row['top1']) * row['images'])} of {row['images']}",
        "parameters": f"{row['parameters']:,}",
        "MACs": f"{row['macs'] / 1e6:.2f} M",
        "+ attention": f"{row['macs_attention'] / 1e6:.2f} M",
        "images/s": f"{row['images_per_second']:,.0f}",
    }


def _show(rows: Sequence[dict[str, Any]]) -> None:
    shown = Table(title="Real handwritten digits, images never trained on")
    for key in _cells(rows[0]):
        shown.add_column(key, justify="left" if key in ("model", "pattern") else "right")
    for row in rows:
        shown.add_row(*_cells(row).values())
    Console(width=None if sys.stdout.isatty() else 110).print(shown)


def _write_report(
    path: Path,
    rows: Sequence[dict[str, Any]],
    trained: Sequence[Trained],
    images: Tensor,
    targets: Tensor,
    class_names: Sequence[str],
) -> None:
    one_of_each = images[[int((targets == digit).nonzero()[0]) for digit in range(2, 2 + SHOWN_IMAGES)]]
    about = ABOUT.format(
        epochs=trained[0].epochs[-1],
        height=images.shape[-2],
        width=images.shape[-1],
        count=len(targets),
        threads=torch.get_num_threads(),
    )
    pictures = [
        ("Learning curves", figures.learning_curves(trained), ""),
        ("Confusion", figures.confusion_matrices(trained, targets, class_names), ""),
        ("Wrongly read", figures.wrongly_read(trained, images, targets, class_names), ""),
        ("What one query looks at", figures.score_maps(trained, one_of_each), ABOUT_SCORES),
        (
            "Singular values of the attention's outputs",
            figures.singular_values(trained, images[:SPECTRUM_IMAGES]),
            ABOUT_SPECTRUM.format(count=SPECTRUM_IMAGES),
        ),
    ]
    sections = [("What was trained", [table([_cells(row) for row in rows]), paragraph(about)])]
    sections += [(title, [picture(figure, title), paragraph(text)]) for title, figure, text in pictures]
    write_page(path, "linvit: reading digits with linear attention", sections)
