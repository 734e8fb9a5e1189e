"""The job `published`: networks of published sizes, trained on Imagenette at 224 px with their papers' recipes."""

import os
import shutil
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from evidence.designs import PATTERNS
from evidence.gpu.data import unpacked
from evidence.gpu.jobs import Case, Results
from evidence.gpu.networks import CODE
from evidence.rows import ROOT
from linvit.files import write_text
from linvit.runs.folder import read_curves

RUNS = ROOT / "runs" / "published"
BUDGET, EVERY, MOST = 320.0, 5, 300  # seconds of a case's epochs; epochs between two evaluations; most epochs
BATCH = 128  # of all four recipes
RECIPES = {
    "mavit_tiny": "mavit/tiny_imagenet_300e",
    "ravlt_tiny": "ravlt/tiny_imagenet_300e",
    "care_s1": "care/s1_imagenet_300e",
    "deit_small_patch16_224": "mechanisms/deit_tiny/softmax",
}
CHANGES: dict[str, Any] = {
    "trainer.precision": "bf16-mixed",
    "trainer.sync_batchnorm": False,
    "trainer.devices": 1,
    "distillation.teacher": None,
    "schedule.cooldown_epochs": 0,
}
AVERAGED = {"task.ema_decay": 0.998, "task.ema_batch": None}  # 0.99996 remembers more steps than there are
TOYS = {"mavit_tiny": "mavit_nano", "ravlt_tiny": "ravlt_nano", "care_s1": "care_nano", "deit_small_patch16_224": None}


def cases(toy: bool) -> list[Case]:
    code = (*CODE, "linvit/runs", "linvit/data")
    return [Case(name, partial(toy_case if toy else case, name), code) for name in RECIPES]


def case(name: str) -> Results:
    """As many epochs as BUDGET allows; after a stop the same call goes on."""
    settings = {"data.root": str(unpacked("imagenette-224")), "data.num_workers": os.cpu_count()}
    return trained(name, settings | {"trainer.accelerator": "gpu"}, RUNS / name)


def trained(name: str, settings: dict[str, Any], folder: Path, most: int = MOST) -> Results:
    """Trains as `linvit train` does: two epochs that tell the pace, and then those that it allows, from the start."""
    from linvit.runs.training import train_folder

    recipe = ROOT / "recipes" / f"{RECIPES[name]}.yaml"
    given = CHANGES | (AVERAGED if name != "care_s1" else {}) | {"model.name": name} | settings
    noted = folder / "epochs"
    if not noted.exists():
        pace = folder / "pace"
        shutil.rmtree(pace, ignore_errors=True)
        short = {"folder": str(pace), "trainer.max_epochs": 2, "schedule.warmup_epochs": 1}
        train_folder(recipe, given | short | {"trainer.check_val_every_n_epoch": 2})
        write_text(noted, str(epochs_within(BUDGET, read_curves(pace)[-1]["seconds"], most)))
    epochs = int(noted.read_text())
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    given |= {"trainer.max_epochs": epochs, "trainer.check_val_every_n_epoch": min(EVERY, epochs)}
    given |= {"folder": str(folder / "run"), "schedule.warmup_epochs": max(1, epochs // 10)}
    train_folder(recipe, given, resume=(folder / "run").exists())
    return row(name, read_curves(folder / "run"), given.get("data.batch_size", BATCH))


def epochs_within(budget: float, seconds: float, most: int = MOST) -> int:
    """How many epochs of so many seconds fit, a multiple of EVERY so that the last one is evaluated; at least that."""
    return min(most, max(EVERY, int(budget / seconds) // EVERY * EVERY))


def row(name: str, curves: list[dict[str, float]], batch: int = BATCH) -> Results:
    """The cells, of epochs without evaluation where there are any; `curve` has the accuracies and losses on the way."""
    seconds = median(epoch["seconds"] for epoch in curves if "top1" not in epoch or len(curves) <= EVERY)
    cells = {
        "network": name,
        "epochs": len(curves),
        "images/s with the loader": curves[0]["step"] * batch / seconds,
        "GiB in training": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None,
        "top-1, %": 100 * curves[-1]["top1"],
        "of the average, %": 100 * curves[-1]["ema_top1"] if "ema_top1" in curves[-1] else None,
    }
    kept = ("seconds", "train_loss", "val_loss", "top1", "ema_top1")
    return {"cells": [cells], "curve": [{key: epoch[key] for key in kept if key in epoch} for epoch in curves]}


def toy_case(name: str) -> Results:
    """Two epochs of a few images of noise."""
    from evidence.gpu.trainings import write_noise

    with TemporaryDirectory() as folder:
        write_noise(PATTERNS, Path(folder) / "data")
        settings: dict[str, Any] = {"data.root": f"{folder}/data", "data.num_workers": 0, "data.size": 32}
        settings |= {"data.batch_size": 8, "model.drop_path_rate": 0.0, "trainer.accelerator": "cpu"}
        small = TOYS[name]
        settings |= {"model.name": small} if small else {"model.depth": 1, "model.img_size": 32}
        return trained(name, settings, Path(folder) / name, most=2)
