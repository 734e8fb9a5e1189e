"""The jobs of trainings: a design's stages on a GPU, many runs at once, with augmentation that runs of a seed share."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from evidence.design import BESIDE, LADDER, SWEEP_SEEDS, Design, Stage, read
from evidence.designs import DESIGNS
from evidence.gpu.data import unpacked
from evidence.gpu.jobs import Case, Results
from evidence.rows import ROOT
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.folder import ImageFolder
from linvit.data.images.small import LAYOUTS, SIDE, Cifar
from linvit.data.order import Augmented, Batches, Position, ResumableBatches
from linvit.environment import end_with_parent
from linvit.files import write_text
from linvit.runs.folder import read_curves
from linvit.runs.recipe import Recipe
from linvit.runs.tasks import SOURCES, ClassificationRun
from linvit.studies.pool import RESULT, Training

CODE = ("evidence/gpu/trainings.py",)
PREPARED = ROOT / "build" / "prepared"
PREPARERS = 6  # processes that augment beside those that train
PATIENCE = 900.0  # seconds that a run waits for an epoch of images, longer than a command takes
TOY = ("trainer.max_epochs=2", "trainer.check_val_every_n_epoch=1", "data.batch_size=8")
TOYS = {  # what makes the networks of a design small
    "referee": ("model.depth=1",),
    "patterns": ("data.size=32",),
    "parts": ("data.size=32",),
    "scale": ("model.depth=1", "model.embed_dim=96", "model.img_size=32", "data.size=32"),
}
FIRST_TOYS = {"patterns": 2, "parts": 2, "scale": 2}  # variants of the first toy case, which runs most often


class Prepared(AugmentedSource):
    """Data whose augmented training images other processes make, once for all runs with a seed.

    Validation images are kept in memory after they have been read once. `cache` is the folder of the files that
    `prepare` writes, an epoch each; an epoch that is not there yet is waited for.
    """

    cache: str

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

    def val_set(self) -> Dataset[Any]:
        return Kept(super().val_set())


class PreparedCifar(Prepared, Cifar):
    """CIFAR; see Prepared, and for the options Cifar."""

    def __init__(self, root: str, cache: str, **options: Any) -> None:
        super().__init__(root, **options)
        self.cache = cache


class PreparedFolder(Prepared, ImageFolder):
    """A folder of images; see Prepared, and for the options ImageFolder."""

    def __init__(self, root: str, cache: str, **options: Any) -> None:
        super().__init__(root, **options)
        self.cache = cache


@dataclass(eq=False)
class Kept(Dataset[Any]):
    """A dataset whose samples are read once."""

    dataset: Any
    samples: dict[int, Any] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Any:
        if index not in self.samples:
            self.samples[index] = self.dataset[index]
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.dataset)


class Made(Dataset[Any]):
    """(image, target) at (epoch, index), from the files of a folder."""

    def __init__(self, folder: Path, images: Any) -> None:
        self.folder = folder
        self.targets = [target for _, target in images.files] if hasattr(images, "files") else images.targets
        self.epoch, self.made = -1, np.empty(0, np.float16)

    def __getitem__(self, position: Position) -> tuple[Tensor, int]:
        epoch, index = position
        if epoch != self.epoch:
            self.epoch, self.made = epoch, np.load(waited_for(self.folder / f"{epoch}.npy"), mmap_mode="r")
        return torch.from_numpy(self.made[index].astype(np.float32)), int(self.targets[index])

    def __len__(self) -> int:
        return len(self.targets)


PREPARED_SOURCES = {"cifar": PreparedCifar, "imagefolder": PreparedFolder}
ADDED = {f"prepared_{name}": source for name, source in PREPARED_SOURCES.items()}
SOURCES.update(ADDED)
ClassificationRun.sources = {**ClassificationRun.sources, **ADDED}


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
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{epoch}.{os.getpid()}"
    shape = len(images), source.preprocessing.channels, *source.preprocessing.size
    made = np.lib.format.open_memmap(temporary, "w+", np.float16, shape)
    for index in range(len(images)):
        made[index] = images[epoch, index][0].numpy()
    made.flush()
    temporary.rename(target)


def look(measure: Callable[[Path], Mapping[str, float]] | None, folder: Path) -> Mapping[str, float]:
    """As `Training.look`; a run's process imports this module by it, and with it the data `prepared_…`."""
    return measure(folder) if measure else {}


def images_of(training: Training) -> str:
    """The name of the folder of augmented images, which runs with the same seed and split share."""
    values = training.values
    return f"seed {values['seed']}, held out {values['data'].get('held_out', 0.0):g}"


def on_card(training: Training, root: Path, prepared: Path, accelerator: str = "gpu") -> Training:
    """The run with settings of this machine, which its values, and so the ledger, do not have."""
    name = training.values["data"]["name"]
    settings = [f"trainer.accelerator={accelerator}", f"data.name=prepared_{name}"]
    settings += [f"data.root={root_of(training, root)}", f"data.cache={prepared / images_of(training)}"]
    return replace(training, overrides=(*training.overrides, *settings), look=partial(look, training.look))


def root_of(training: Training, root: Path) -> Path:
    """Of a folder with train/ and val/, train/ alone where a share of it is held out."""
    data = training.values["data"]
    return root / "train" if data["name"] == "imagefolder" and "held_out" in data else root


def cases(name: str, toy: bool) -> list[Case]:
    stages = DESIGNS[name].stages
    if toy:
        few = replace(stages[1], name=f"{stages[1].name}, few", variants=stages[1].variants[: FIRST_TOYS.get(name)])
        whole = [stages[1]] if len(few.variants) == len(stages[1].variants) else [few, stages[1]]
        return [Case(stage.name, partial(toy_stage, stage), CODE) for stage in (whole[0], stages[0], *whole[1:])]
    return [Case(stage.name, partial(train, stage), CODE) for stage in stages]


referee, patterns, parts, scale = (partial(cases, name) for name in ("referee", "patterns", "parts", "scale"))
"""The cases of the jobs of these names."""


def train(stage: Stage) -> Results:
    """A stage of the real size; after a stop the same call goes on."""
    root = unpacked(stage.design.data)
    with shared_card():
        here = partial(on_card, root=root, prepared=PREPARED)
        with augmented(stage, root, min(PREPARERS, os.cpu_count() or 1)):
            stage.train(stage.workers, print, here)
    shutil.rmtree(PREPARED, ignore_errors=True)  # tens of GiB
    return {"cells": cells(stage)}


@contextmanager
def augmented(
    stage: Stage, root: Path, processes: int, prepared: Path = PREPARED, folder: Path = Path()
) -> Iterator[None]:
    """Meanwhile other processes augment what the unfinished runs of a stage read, in about the order they read it.

    Those of a sweep make all of its images, since it may grow. folder: where the folders of toy runs are.
    """
    for stopped in prepared.glob("*/.*"):
        stopped.unlink()  # an epoch that was being written when an earlier command was killed
    done = read(stage.ledger) if stage.seeds else {}
    groups: dict[str, list[Training]] = {}
    for run in stage.trainings():
        if run.label not in done:
            data = {**run.values["data"], "root": str(root_of(run, root))}
            moved = replace(run, values={**run.values, "data": data}, look=None, folder=inside(folder, run.folder))
            groups.setdefault(images_of(run), []).append(moved)
    pool, stop = ProcessPoolExecutor(processes, get_context("spawn"), begin), Event()
    ahead = stage.design.ahead if stage.seeds else None
    at_once = len(groups) if ahead is None else max(1, stage.workers // len(stage.variants)) + 1
    thread = Thread(target=keep_ahead, args=(groups, pool, ahead, at_once, prepared, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        pool.shutdown(cancel_futures=True)


def inside(folder: Path, path: Path) -> Path:
    """The path below a folder; itself without one."""
    return path if folder == Path() else folder / path.relative_to("/")


def keep_ahead(
    groups: Mapping[str, Sequence[Training]],
    pool: ProcessPoolExecutor,
    ahead: int | None,
    at_once: int,
    prepared: Path,
    stop: Event,
) -> None:
    """Has the epochs of images of groups of runs made, and removes those that all runs of a group have read.

    at_once: unfinished groups that are made for, the first ones.
    """
    asked: set[tuple[str, int]] = set()
    while True:
        windows = {name: window(runs, ahead) for name, runs in groups.items()}
        for name, (first, _) in windows.items():
            for file in prepared.joinpath(name).glob("*.npy") if ahead is not None else ():
                if int(file.stem) < first:
                    file.unlink()
        wanted = []
        unfinished = [name for name, (first, behind) in windows.items() if first < behind]
        for place, name in enumerate(unfinished[:at_once]):
            spread = 0 if ahead is not None else groups[name][0].values["trainer"]["max_epochs"] // 2
            wanted += [(epoch + place * spread, epoch, name) for epoch in range(*windows[name])]
        for _, epoch, name in sorted(wanted):
            if (name, epoch) not in asked:
                asked.add((name, epoch))
                pool.submit(prepare, groups[name][0], epoch, prepared / name)
        if ahead is None or stop.wait(0.5):
            return


def window(runs: Sequence[Training], ahead: int | None) -> tuple[int, int]:
    """The epochs (first, behind the last) of which images are kept for runs with one seed.

    The one before that of the slowest run too: a run that is resumed may begin its last epoch again.
    """
    epochs: int = runs[0].values["trainer"]["max_epochs"]
    if ahead is None:
        return 0, epochs
    reached = [len(read_curves(run.folder)) for run in runs if not (run.folder / RESULT).is_file()]
    slowest = min(reached, default=epochs + 1)
    return max(0, slowest - 1), min(epochs, slowest + ahead + 1)


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
    rows, listed = read(stage.ledger), []
    for name in stage.variants:
        runs = [rows[run.label]["result"] for run in stage.trainings() if run.recipe.stem == name]
        ended = [run for run in runs if not run["reason"]]
        best = max((run["inside"]["last"] for run in ended), default=None)
        row = {"stage": stage.name, "network": name, "runs": len(runs), "diverged": len(runs) - len(ended)}
        listed.append(row | {"s per run": mean(run["seconds"] for run in runs), "best top-1, %": best and 100 * best})
    return listed


def toy_stage(real: Stage) -> Results:
    """Every variant, or one in the sweep of rates, for a few steps on noise, by the same code but without a card."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        root = folder / "data"
        write_noise(real.design, root)
        design = replace(real.design, folder=folder / "evidence", settings=(*TOY, *TOYS[real.design.name]))
        stage = replace(real, design=design, seeds=real.seeds[:1])
        if stage.seeds:
            write_rates(design)
        else:
            short = replace(design, settings=(*design.settings, "trainer.max_epochs=1"))
            stage = replace(stage, design=short, variants=real.variants[-2:-1])
        prepared = folder / "prepared"
        here = partial(on_card, root=root, prepared=prepared, accelerator="cpu")
        with augmented(stage, root, 1, prepared, folder):
            workers = len(stage.variants) if design.ahead is not None and stage.seeds else 2
            stage.train(workers, print, lambda run: replace(here(run), folder=inside(folder, run.folder)))
        return {"cells": cells(stage)}


def write_noise(design: Design, root: Path) -> None:
    """A few images of noise in the form of a design's data."""
    draw = np.random.default_rng(0)
    if design.data == "cifar":
        layout = LAYOUTS[0]
        folder = root / layout.folder
        folder.mkdir(parents=True)
        (folder / layout.names).write_text("\n".join(f"class {number}" for number in range(10)) + "\n")
        for name in (*layout.train, layout.test):
            labels, pixels = np.arange(10) % 10, draw.integers(0, 256, (10, 3 * SIDE * SIDE))
            np.concatenate([labels[:, None], pixels], 1).astype(np.uint8).tofile(folder / name)
        return
    for split, count in (("train", 10), ("val", 2)):
        for label, number in product("ab", range(count)):
            path = root / split / label / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (32, 32, 3), np.uint8)).save(path)


def write_rates(design: Design) -> None:
    """A ledger of a sweep in which 2e-3 was the best rate of every variant, with what that asks for."""
    lines, place = [], LADDER.index("2e-3")
    rates = sorted({*design.swept, *LADDER[place - BESIDE : place + BESIDE + 1]})
    for name, rate, seed in product(design.variants, rates, SWEEP_SEEDS):
        result = {"reason": None, "seconds": 60.0, "measures": {}, "inside": {"last": 0.5 if rate == "2e-3" else 0.4}}
        lines.append(json.dumps({"run": f"{name} at {rate} seed {seed}", "settings": "", "result": result}))
    write_text(design.rates, "\n".join([*lines, ""]))
