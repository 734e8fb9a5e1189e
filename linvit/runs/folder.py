"""A run's folder: locked by one training at a time, with checkpoints written atomically and training curves as CSV."""

import contextlib
import csv
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from linvit.errors import refuse
from linvit.files import (
    BEST,
    LAST,
    LOCK,
    explained,
    locked,
    read_checkpoint,
    reason_of,
    remove_leftovers,
    replacing,
    write_csv,
)
from linvit.ranges import allows
from linvit.runs.progress import remedies, waiting
from linvit.tasks.measures import column, line
from linvit.tasks.task import Task

logger = logging.getLogger(__name__)

RECIPE, ENVIRONMENT, CURVES, METRICS = "recipe.yaml", "environment.json", "curves.png", "metrics.csv"
PATIENCE = 6.0  # seconds; data-loading processes keep the lock for about five seconds after a training was killed
REDRAWN = 30.0  # seconds
STOPPING = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
"""Signals that end a training: Ctrl-C, a request from outside, and a closed terminal."""


class RunStoppedError(Exception):
    """Training was stopped on request; the last checkpoint has been written."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints atomically, and reads them without running code."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        try:
            with replacing(path) as temporary:
                torch.save(checkpoint, temporary)
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else reason_of(error)
            raise OSError(
                f"The checkpoint {path} could not be written ({reason}); the one before it is untouched:"
                " make room or allow writing there, then train again with `resume=True`."
            ) from error

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return read_checkpoint(path)


@dataclass(eq=False)
class RunFolder(Checkpoint):
    """Writes folder/checkpoints/last.ckpt and best.ckpt, and folder/metrics.csv with one row per epoch.

    The rows are part of the checkpoint, so the curve of a resumed run has neither gaps nor duplicates. `about` is
    stored in every checkpoint under "linvit", for loading the run. The task's score chooses the best checkpoint;
    of equal ones, the earlier is kept. `say` gets a line per epoch. `draw` gets rows and task and plots them, at most
    twice a minute, after the last epoch and when the run stops.
    """

    folder: Path
    about: dict[str, Any]
    say: Callable[[str], None] | None = None
    draw: Callable[[list[dict[str, float]], Task], None] | None = None

    def __post_init__(self) -> None:
        self.last_drawn = time.monotonic(), 0
        self.rows: list[dict[str, float]] = []
        self.started = time.monotonic()
        self.validated = False

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / LAST

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints" / BEST

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rows: Any = state_dict.get("rows")
        if not allows(list[dict[str, Any]], rows) or not all(
            allows(float, value) for row in rows for value in row.values()
        ):
            raise ValueError("The checkpoint's training curve is damaged: resume from another checkpoint.")
        self.rows = list(rows)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["linvit"] = self.about

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.monotonic()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Task) -> None:  # type: ignore[override]
        row: dict[str, float] = {"epoch": trainer.current_epoch + 1, "step": trainer.global_step}
        # Lightning keeps old measures until they are computed again
        validated, self.validated = self.validated, False
        stale = ("train/loss_step",) if validated else ("train/loss_step", "val/")
        row |= {
            _column(key): value.item() for key, value in trainer.callback_metrics.items() if not key.startswith(stale)
        }
        row["seconds"] = round(time.monotonic() - self.started, 3)
        is_best = self._is_best(row, pl_module)
        if validated and math.isnan(row.get(column(pl_module.monitor), math.nan)):
            logger.warning(
                "The held-out %s have nothing to measure the %s on, so %s is not updated.",
                pl_module.counted,
                pl_module.measures[pl_module.score].heading,
                BEST,
            )
        self.rows.append(row)
        trainer.save_checkpoint(self.last)
        if is_best:
            trainer.save_checkpoint(self.best)
        if trainer.is_global_zero:
            write_csv(self.folder / METRICS, self.rows)
            if self.say:
                said = line(row, trainer.max_epochs, pl_module.headline, pl_module.measures)
                if share := waiting(trainer):
                    said += ": ".join(filter(None, (f", waiting for data {share}", remedies(trainer))))
                self.say(said)
            if time.monotonic() - self.last_drawn[0] > REDRAWN:
                self._draw(pl_module)

    def _is_best(self, row: dict[str, float], task: Task) -> bool:
        monitored = column(task.monitor)
        sign = -1 if task.measures[task.score].lower_is_better else 1
        earlier = [sign * before[monitored] for before in self.rows if not math.isnan(before.get(monitored, math.nan))]
        return monitored in row and sign * row[monitored] > max(earlier, default=float("-inf"))

    def on_train_end(self, trainer: Trainer, pl_module: Task) -> None:  # type: ignore[override]
        if trainer.is_global_zero:
            self._draw(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: Task, exception: BaseException) -> None:  # type: ignore[override]
        if trainer.is_global_zero and not isinstance(exception, OSError):
            self._draw(pl_module)

    def _draw(self, task: Task) -> None:
        if self.draw and len(self.rows) != self.last_drawn[1]:
            self.draw(self.rows, task)
            self.last_drawn = time.monotonic(), len(self.rows)


class StopSafely(Callback):
    """On Ctrl-C, SIGTERM or SIGHUP, finishes the batch (or validation), saves a checkpoint and raises RunStoppedError.

    A second Ctrl-C stops at once; the last saved checkpoint is complete either way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.requested = False
        self._process = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.getsignal(number) for number in STOPPING}

    # not earlier: Lightning sets its own handlers before the training starts
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for number in self._before:
            signal.signal(number, self._request)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.world_size == 1:  # a launcher stops the other processes: its signal must not hide why this one ends
            self.teardown(trainer, pl_module, "fit")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._asked(trainer):
            raise RunStoppedError  # the epoch before has been saved at its end

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        progress = trainer.fit_loop.epoch_loop
        at_end = progress.batch_progress.is_last_batch or progress._num_ready_batches_reached()
        # inside an accumulation, gradients would be lost; after the last batch, the end of the epoch saves
        if self._asked(trainer) and not at_end and not progress._should_accumulate():
            trainer.save_checkpoint(self.path)
            raise RunStoppedError

    def _asked(self, trainer: Trainer) -> bool:
        if trainer.world_size == 1:
            return self.requested
        return trainer.strategy.reduce_boolean_decision(self.requested, all=False)

    def _request(self, signum: int, frame: Any) -> None:
        if os.getpid() != self._process:  # one that reads data, which ends with this one
            return
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        logger.warning("Stopping after this batch; press Ctrl-C again to stop at once.")


def _column(key: str) -> str:
    """val/top1 → top1, val/loss → val_loss, val/ema_loss → ema_loss, train/loss → train_loss, lr → lr."""
    group, _, name = key.rpartition("/")
    return f"{group}_loss" if name == "loss" else name


def read_curves(folder: Path) -> list[dict[str, float]]:
    """The training curves of a run, one row per epoch; empty without metrics.csv."""
    path = folder / METRICS
    if not path.is_file():
        return []
    with (
        explained(
            lambda reason: f"The training curves in {path} are damaged ({reason}): remove the file.",
            (ValueError, TypeError, csv.Error),
        ),
        path.open(newline="", encoding="utf-8") as file,
    ):
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@contextlib.contextmanager
def locked_folder(folder: Path, resume: bool) -> Iterator[None]:
    """Creates the folder and locks it; a training that fails before its first checkpoint leaves no files.

    Raises ValueError if another training has the lock, or, unless resumed, if the folder is not empty; OSError if it
    cannot be written.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    busy = f"Another training is running in {folder}: wait for it to end, or choose another `folder`."
    full = f"The run's folder {folder} is not empty: continue with `resume=True`, or choose another with `folder=…`."

    def empty() -> bool:
        return not folder.is_dir() or all(path.name == LOCK for path in folder.iterdir())

    refuse(not resume and not empty() and full)
    with locked(folder, busy, PATIENCE):
        present = set(folder.iterdir())
        try:
            refuse(not resume and not empty() and full)  # another training may have run while this one waited
            remove_leftovers(folder, folder / "checkpoints")
            yield
        except BaseException:
            if not (folder / "checkpoints").exists():
                for path in set(folder.iterdir()) - present:
                    if path.is_dir():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink(missing_ok=True)
            raise
        finally:
            if empty():
                (folder / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another process has put a file there
                    for path in missing:
                        path.rmdir()
