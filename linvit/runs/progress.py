"""Progress on the terminal, a bar or lines, without Lightning's own notes."""

import contextlib
import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar, cast

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.markup import escape
from rich.progress import ProgressColumn, track
from rich.progress import Task as Progressed
from rich.text import Text

from linvit.data.source import Source, usable_cores
from linvit.tasks.task import Task

LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric")
NOTES = (  # warnings about things that linvit does on purpose or users cannot change
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    r"Found \d+ module\(s\) in eval mode",
    r"The '\w+' does not have many workers",
    r"Consider setting `persistent_workers=True`",
    r"You're resuming from a checkpoint that ended before the epoch ended",
    r"It is recommended to use `self\.log",
    r"Trying to infer the `batch_size`",
    r"Total length of `\w+` across ranks is zero",
    r"Grad strides do not match",
)
WAITING, BRIEFLY = 0.3, 2.0  # share of the time, and seconds: what is no more is not worth a word
INTERVAL = 10.0  # seconds between log lines
Item = TypeVar("Item")

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Drops what Lightning logs about devices and tips, and the warnings of NOTES.

    Also drops the traceback of TensorBoard's writer on a full disk: the next write reports the error.
    """
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    hook = threading.excepthook
    with warnings.catch_warnings():
        for note in NOTES:
            warnings.filterwarnings("ignore", message=rf"\s*{note}")
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.WARNING)
        threading.excepthook = lambda thrown: None if issubclass(thrown.exc_type, OSError) else hook(thrown)
        try:
            yield
        finally:
            threading.excepthook = hook
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


class Speed(ProgressColumn):
    """Steps per second, or seconds per step where that is more than one."""

    def render(self, task: Progressed) -> Text:
        if not task.speed:
            return Text("")
        return Text(f"{task.speed:.2f} step/s" if task.speed >= 1 else f"{1 / task.speed:.1f} s/step")


class Bar(RichProgressBar):
    """Lightning's bar, with the loss and the task's score under its heading."""

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        return [*super().configure_columns(trainer)[:-1], Speed()]

    def _get_train_description(self, current_epoch: int) -> str:
        """Counts epochs from 1, as the lines of a pipe and metrics.csv do."""
        last = self.trainer.max_epochs
        return f"Epoch {current_epoch + 1}" + (f"/{last}" if last is not None else "")

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = {}
        measures = cast(Task, pl_module).measures
        for key, value in super().get_metrics(trainer, pl_module).items():
            name = key.removeprefix("val/")
            if key == "train/loss_step":
                metrics["train loss"] = value
            elif name in measures:
                metrics[f"val {measures[name].heading}"] = measures[name].cell(float(cast(float, value)))
        if share := waiting(trainer):
            metrics["waiting for data"] = share
        return metrics


def waiting(trainer: Trainer) -> str:
    """How much of the time a training waits for its data, in words; empty for little."""
    seconds, share = getattr(trainer.train_dataloader, "waited", (0.0, 0.0))
    return f"{100 * share:.0f} %" if share > WAITING and seconds > BRIEFLY else ""


def remedies(trainer: Trainer) -> str:
    """Settings that make the data of a training come faster, in words; empty if there are none."""
    source = cast(Source, trainer.datamodule)  # type: ignore[attr-defined]
    settings = ["more data.num_workers"] if source.num_workers < usable_cores() else []
    if getattr(source, "augment_on", None) == "cpu" and trainer.strategy.root_device.type == "cuda":
        settings.append("data.augment_on=device")
    return " or ".join(settings)


def bars(progress: bool) -> list[Bar]:
    """A bar, if progress is wanted and standard output is a terminal."""
    return [Bar(leave=True)] if progress and sys.stdout.isatty() else []


def say(line: str) -> None:
    """Writes a line to standard output at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tracked(items: Iterable[Item], description: str, total: int | None = None, progress: bool = True) -> Iterable[Item]:
    """The items, if progress is wanted with a bar on stderr, or with log lines if stderr is not a terminal."""
    if not progress:
        return items
    if not sys.stderr.isatty():
        return _logged(items, description, total)
    return track(items, escape(description), total, console=Console(stderr=True), transient=True)


def _logged(items: Iterable[Item], description: str, total: int | None) -> Iterator[Item]:
    """The items; logs every INTERVAL seconds how many are done."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    of_total = "" if total is None else f" of {total:,}"
    last = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - last >= INTERVAL:
            last = time.monotonic()
            logger.info("%s: %s%s done", description, f"{done:,}", of_total)
        yield item
