"""What the user sees: tables, a progress bar, and none of Lightning's small talk."""

import contextlib
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console
from rich.table import Table

UNBOUND = 1000  # columns: no terminal, so nothing to wrap for
LOGGERS = ("lightning", "lightning.pytorch", "lightning.fabric")


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Drops Lightning's notes on devices and its guesses about worker counts and log intervals.

    Also the traceback of TensorBoard's writer on a full disk: the next thing that is written there reports it.
    """
    before = {name: logging.getLogger(name).level for name in LOGGERS}
    hook = threading.excepthook
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\..*")
        warnings.filterwarnings("ignore", message="Grad strides do not match")  # costs DDP a copy, changes nothing
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.ERROR)
        threading.excepthook = lambda thrown: None if issubclass(thrown.exc_type, OSError) else hook(thrown)
        try:
            yield
        finally:
            threading.excepthook = hook
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


class Bar(RichProgressBar):
    """Lightning's bar with loss and accuracies under their short names."""

    NAMES = {"train/loss_step": "loss", "val/top1": "top1", "val/ema_top1": "ema_top1"}  # noqa: RUF012

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        return {self.NAMES[key]: value for key, value in metrics.items() if key in self.NAMES}


def bars() -> list[Bar]:
    """One bar on a terminal, none elsewhere."""
    return [Bar(leave=True)] if sys.stdout.isatty() else []


def show_pieces(pieces: Iterable[str]) -> None:
    """Prints text as it comes, until who reads along, `head` for example, has enough."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end


def show(table: Table) -> None:
    """Prints a table, in full width where there is no terminal."""
    Console(width=None if sys.stdout.isatty() else UNBOUND).print(table)
