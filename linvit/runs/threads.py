"""How many threads a training on a CPU computes with: small networks are often fastest with one."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, cast

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from linvit.tasks.task import Task

SLOW = 3  # times the shortest epoch
MEASURED = 0.15  # seconds of steps for each number of threads
GAIN = 0.75  # more threads must bring a step below this share of its time

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ChoosesThreads(Callback):
    """Measures the first batch with 1, 2, 4, … threads, at most as many as torch has now, and uses the fastest.

    chosen: called with the number, before the first step.
    """

    chosen: Callable[[int], None]
    done: bool = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.done:
            return
        self.done = True
        task, precision, most = cast(Task, pl_module), trainer.precision_plugin, torch.get_num_threads()

        def step() -> None:
            with precision.train_step_context(), torch.compiler.set_stance("force_eager"):
                task.rehearse(batch)

        torch.set_num_threads(1)  # more may take seconds while the cores are busy
        step()  # prepares what the later ones use again
        seconds = measured(step, most)
        number = fastest(seconds)
        torch.set_num_threads(number)
        shown = ", ".join(f"{count}: {taken:.3f} s" for count, taken in seconds.items())
        logger.info("Threads and seconds of a step: %s; computing with %d of %d.", shown, number, most)
        self.chosen(number)


def measured(step: Callable[[], None], most: int) -> dict[int, float]:
    """Seconds of a step by number of threads: 1, 2, 4, … and the most, up to the first that is no faster."""
    seconds: dict[int, float] = {}
    for number in sorted({*(1 << power for power in range(most.bit_length())), most}):
        torch.set_num_threads(number)
        taken: list[float] = []
        while sum(taken) < MEASURED:
            start = time.perf_counter()
            step()
            taken.append(time.perf_counter() - start)
        seconds[number] = median(taken)
        if fastest(seconds) != number:
            break
    return seconds


def fastest(seconds: Mapping[int, float]) -> int:
    """The number of threads with which a step is fastest; one with more threads must be clearly faster."""
    best = 1
    for number, taken in seconds.items():
        if taken < GAIN * seconds[best]:
            best = number
    return best


class WatchesEpochs(Callback):
    """Says once that an epoch took much longer than others: with several threads, other work on the cores does that."""

    def __init__(self) -> None:
        self.started, self.shortest, self.warned = 0.0, float("inf"), False

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        taken, threads = time.perf_counter() - self.started, torch.get_num_threads()
        if not self.warned and threads > 1 and taken > max(1.0, SLOW * self.shortest):
            self.warned = True
            logger.warning(
                "Epoch %d took %.1f s, an earlier one %.1f s, with %d threads: if other programs keep the processor"
                " busy, stop and continue with --resume trainer.threads=1.",
                trainer.current_epoch + 1,
                taken,
                self.shortest,
                threads,
            )
        self.shortest = min(self.shortest, taken)
