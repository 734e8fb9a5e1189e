"""The job of the referee: its stages on one GPU, many runs at once, with augmentation that runs of a seed share."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from evidence import referee
from evidence.gpu import cifar
from evidence.gpu.jobs import Case, Results
from evidence.referee import STAGES, Stage
from evidence.rows import ROOT
from linvit.data.images.small import LAYOUTS, SIDE, Cifar
from linvit.data.order import Augmented, Batches, Position, ResumableBatches
from linvit.environment import end_with_parent
from linvit.files import write_text
from linvit.runs.recipe import Recipe
from linvit.runs.tasks import SOURCES, ClassificationRun
from linvit.studies.pool import Training

CODE = ("evidence/gpu/referee.py",)
PREPARED = ROOT / "build" / "referee"
PREPARERS = 6  # processes that augment beside those that train
PATIENCE = 300.0  # seconds that a run waits for an epoch of images
TOY = ("model.depth=1", "trainer.max_epochs=2", "data.batch_size=8")


class Prepared(Cifar):
    """CIFAR whose augmented training images other processes make, once for all runs with a seed.

    Args:
        cache: Folder of the files that `prepare` writes, an epoch each. An epoch that is not there yet is waited for.
        options: See Cifar.
    """

    def __init__(self, root: str, cache: str, **options: Any) -> None:
        super().__init__(root, **options)
        self.cache = cache

    def train_dataloader(self) -> Batches:
        images = Made(Path(self.cache), self.train_set())
        self._batches = ResumableBatches(
            images,
            sampler=self.train_order(images),
            drop_last=True,
            reached=self._reached,
            **self._loading(False) | {"num_workers": 0},
        )
        return self._batches


class Made(Dataset[Any]):
    """(image, target) at (epoch, index), from the files of a folder."""

    def __init__(self, folder: Path, images: Any) -> None:
        self.folder, self.targets = folder, images.targets
        self.epoch, self.made = -1, np.empty(0, np.float16)

    def __getitem__(self, position: Position) -> tuple[Tensor, int]:
        epoch, index = position
        if epoch != self.epoch:
            self.epoch, self.made = epoch, np.load(waited_for(self.folder / f"{epoch}.npy"), mmap_mode="r")
        return torch.from_numpy(self.made[index].astype(np.float32)), int(self.targets[index])

    def __len__(self) -> int:
        return len(self.targets)


SOURCES["prepared"] = Prepared
ClassificationRun.sources = {**ClassificationRun.sources, "prepared": Prepared}


def waited_for(file: Path) -> Path:
    """The file, once it is there. Raises TimeoutError after PATIENCE."""
    until = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{file} has not been made in {PATIENCE:g} s, expected augmented images of an epoch.")
        time.sleep(0.2)
    return file


def prepare(training: Training, epoch: int, folder: Path) -> None:
    """Writes the augmented training images of an epoch of a run, float16 (images, 3, height, width)."""
    target = folder / f"{epoch}.npy"
    if target.exists():
        return
    source = Recipe({**training.values, "folder": "unused"}).source()
    images = Augmented(source.train_set(), source.seed)
    made = np.stack([images[epoch, index][0].half().numpy() for index in range(len(images))])
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{epoch}.{os.getpid()}"
    with temporary.open("wb") as file:
        np.save(file, made)
    temporary.rename(target)


def look(folder: Path) -> dict[str, float]:
    """As `referee.curve`; a run's process imports this module by it, and with it the data `prepared`."""
    return referee.curve(folder)


def images_of(training: Training) -> str:
    """The name of the folder of augmented images, which runs with the same seed and split share."""
    values = training.values
    return f"seed {values['seed']}, held out {values['data'].get('held_out', 0.0):g}"


def on_card(training: Training, root: Path, prepared: Path, accelerator: str = "gpu") -> Training:
    """The run with settings of this machine, which its values, and so the ledger, do not have."""
    settings = [f"trainer.accelerator={accelerator}", "data.name=prepared", f"data.root={root}"]
    settings.append(f"data.cache={prepared / images_of(training)}")
    return replace(training, overrides=(*training.overrides, *settings), look=look)


def cases(toy: bool) -> list[Case]:
    if toy:
        return [Case(name, partial(toy_stage, name), CODE) for name in ("referee_100", "referee_rates")]
    return [Case(stage.name, partial(train, stage), CODE) for stage in STAGES]


def train(stage: Stage) -> Results:
    """A stage of the real size; after a stop the same call goes on."""
    root = cifar.unpacked()
    with shared_card():
        begin_preparing = partial(augmented, root=root, processes=min(PREPARERS, os.cpu_count() or 1))
        with begin_preparing(stage):
            stage.train(referee.WORKERS, print, partial(on_card, root=root, prepared=PREPARED))
    shutil.rmtree(PREPARED, ignore_errors=True)  # 9 GiB for each seed
    return {"cells": cells(stage)}


@contextmanager
def augmented(stage: Stage, root: Path, processes: int, folder: Path = PREPARED) -> Iterator[None]:
    """Meanwhile other processes augment what the unfinished runs of a stage read, in about the order they read it.

    Those of a sweep make all of its images, since it may grow.
    """
    done = referee.read(stage.ledger) if stage.seeds else {}
    of_images = {images_of(run): run for run in stage.trainings() if run.label not in done}
    wanted = [
        (epoch + place * run.values["trainer"]["max_epochs"] // 2, epoch, name)
        for place, (name, run) in enumerate(of_images.items())
        for epoch in range(run.values["trainer"]["max_epochs"])
    ]
    pool = ProcessPoolExecutor(processes, get_context("spawn"), begin)
    try:
        for _, epoch, name in sorted(wanted):
            values = of_images[name].values
            run = replace(of_images[name], values={**values, "data": {**values["data"], "root": str(root)}}, look=None)
            pool.submit(prepare, run, epoch, folder / name)
        yield
    finally:
        pool.shutdown(cancel_futures=True)


def begin() -> None:
    """What a process that augments begins with: it ends with its parent, and leaves the cores to those that train."""
    end_with_parent()
    os.nice(5)
    torch.set_num_threads(1)


@contextmanager
def shared_card() -> Iterator[None]:
    """Lets processes compute on the card at the same time (NVIDIA's MPS), if that starts here; else they take turns."""
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield
        return
    with TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        daemon = subprocess.Popen([program, "-f"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            time.sleep(2.0)
            checked = "import torch; torch.ones(1, device='cuda').sum().item()"
            if subprocess.run([sys.executable, "-c", checked], check=False, timeout=60, capture_output=True).returncode:
                print("The card cannot be shared by MPS here: processes take turns.")
                del os.environ["CUDA_MPS_PIPE_DIRECTORY"]
            yield
        finally:
            os.environ.pop("CUDA_MPS_PIPE_DIRECTORY", None)
            daemon.kill()
            daemon.wait()


def cells(stage: Stage) -> list[dict[str, Any]]:
    """A row of the table for each variant of a finished stage."""
    rows, listed = referee.read(stage.ledger), []
    for name in stage.variants:
        runs = [rows[run.label]["result"] for run in stage.trainings() if run.recipe.stem == name]
        ended = [run for run in runs if not run["reason"]]
        best = max((run["inside"]["last"] for run in ended), default=None)
        row = {"stage": stage.name, "network": name, "runs": len(runs), "diverged": len(runs) - len(ended)}
        listed.append(row | {"s per run": mean(run["seconds"] for run in runs), "best top-1, %": best and 100 * best})
    return listed


def toy_stage(name: str) -> Results:
    """Every variant, or two in the sweep of rates, for a few steps on noise, by the same code but without a card."""
    with TemporaryDirectory() as folder:
        root, out = Path(folder) / "cifar", Path(folder) / "evidence"
        write_noise(root)
        (real,) = [stage for stage in STAGES if stage.name == name]
        stage = replace(real, folder=out, settings=(*TOY, f"data.root={root}"), seeds=real.seeds[:1])
        if stage.seeds:
            write_rates(stage)
        else:
            stage = replace(stage, variants=("linear",), settings=(*stage.settings, "trainer.max_epochs=1"))
        prepared = Path(folder) / "prepared"
        with augmented(stage, root, 1, prepared):
            here = partial(on_card, root=root, prepared=prepared, accelerator="cpu")
            stage.train(2, print, lambda run: replace(here(run), folder=Path(folder) / run.folder.relative_to("/")))
        return {"cells": cells(stage)}


def write_noise(root: Path) -> None:
    """CIFAR-10's files with a few images of noise."""
    layout, draw = LAYOUTS[0], np.random.default_rng(0)
    folder = root / layout.folder
    folder.mkdir(parents=True)
    (folder / layout.names).write_text("\n".join(f"class {number}" for number in range(10)) + "\n")
    for name in (*layout.train, layout.test):
        labels, pixels = np.arange(10) % 10, draw.integers(0, 256, (10, 3 * SIDE * SIDE))
        np.concatenate([labels[:, None], pixels], 1).astype(np.uint8).tofile(folder / name)


def write_rates(stage: Stage) -> None:
    """A ledger of a sweep in which 2e-3 was the best rate of every variant."""
    lines = []
    for name, rate, seed in product(stage.variants, referee.SWEPT, referee.SWEEP_SEEDS):
        result = {"reason": None, "seconds": 60.0, "measures": {}, "inside": {"last": 0.5 if rate == "2e-3" else 0.4}}
        lines.append(json.dumps({"run": f"{name} at {rate} seed {seed}", "settings": "", "result": result}))
    write_text(stage.rates, "\n".join([*lines, ""]))
