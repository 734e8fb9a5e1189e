"""Many short trainings, a few at a time: worker processes that are started once and train one run after another.

A run is complete when its folder holds result.json. What is complete is not repeated, what was begun goes on from its
last checkpoint, and a loss that is no longer finite is a result.
"""

import csv
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from linvit.files import replacing
from linvit.runs.evaluate import cell
from linvit.tasks.checkpoints import BEST, RunStoppedError

ASKED, RESULT = "asked.json", "result.json"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Run:
    """One training: a label for the screen, a recipe with overrides, and all its values without the folder.

    measure is the column of its metrics that its result holds, that of the last epoch.
    """

    label: str
    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    values: Mapping[str, Any]
    measure: str = "top1"

    def result(self) -> dict[str, Any] | None:
        """What the complete run ended with; None while there is something left to do.

        Raises ValueError where the folder holds a run with other values.
        """
        asked = self.folder / ASKED
        if asked.is_file() and json.loads(asked.read_text()) != self.values:
            raise ValueError(
                f"{self.folder} holds a run with other settings than {self.recipe} has now: delete that folder to run"
                " it anew, or choose another folder with --folder."
            )
        done = self.folder / RESULT
        return json.loads(done.read_text()) if done.is_file() else None


@dataclass
class Progress:
    """What is done of a list of runs, and when it will be: seconds a run are those since the start of this command."""

    total: int
    done: int = 0
    running: tuple[str, ...] = ()
    here: int = 0
    started: float = 0.0

    def line(self, label: str, result: Mapping[str, Any], measure: str = "top1") -> str:
        """`[12/150] rala seed 3: 91.24 %, 21 s; running: mala seed 3; about 34 min left`."""
        value = result[measure]
        outcome = "did not stay finite" if value is None else cell(measure, value)
        parts = [f"[{self.done}/{self.total}] {label}: {outcome}, {result['seconds']:.0f} s"]
        if self.running:
            parts.append(f"running: {', '.join(self.running)}")
        if self.done < self.total:
            left = (time.monotonic() - self.started) / max(1, self.here) * (self.total - self.done) / 60
            parts.append(f"about {math.ceil(left)} min left")
        return "; ".join(parts)


class StopsBetweenEpochs(Callback):
    """Ends a run before its next epoch where the parent asks for it or is gone; the epoch before has been saved."""

    def __init__(self, stop: Any) -> None:
        self.stop = stop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent and to every worker

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        parent = multiprocessing.parent_process()
        if self.stop.is_set() or (parent is not None and not parent.is_alive()):
            raise RunStoppedError


def run_all(runs: Sequence[Run], workers: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Completes every run and returns their results, in order.

    Args:
        runs: what to run; a run that is complete is not repeated.
        workers: how many processes train at once, one thread each.
        say: gets one line when a run is complete.

    Raises ValueError for a folder that holds another run, RunStoppedError, saying how to go on, after Ctrl-C, and
    ConnectionError where a worker died.
    """
    results = [run.result() for run in runs]
    waiting = [index for index, result in enumerate(results) if result is None]
    progress = Progress(len(runs), len(runs) - len(waiting), started=time.monotonic())
    if not waiting:
        return results  # type: ignore[return-value]
    with _workers(min(workers, len(waiting))) as (lines, stop):
        busy: dict[Any, int] = {}
        try:
            while waiting or busy:
                for line in lines:
                    if line not in busy and waiting:
                        busy[line] = waiting.pop(0)
                        line.send(runs[busy[line]])
                for line in connection.wait(list(busy)):
                    index = busy.pop(line)  # type: ignore[arg-type]
                    results[index] = _received(line, runs[index])
                    progress.done, progress.here = progress.done + 1, progress.here + 1
                    progress.running = tuple(runs[other].label for other in busy.values())
                    say(progress.line(runs[index].label, results[index], runs[index].measure))  # type: ignore[arg-type]
        except KeyboardInterrupt:
            stop.set()
            say("Stopping: each run that is under way saves its epoch.")
            connection.wait(list(busy), 120)
            raise RunStoppedError(
                f"Stopped with {progress.done} of {len(runs)} runs complete: the same command goes on from there."
            ) from None
    return results  # type: ignore[return-value]


def _received(line: Any, run: Run) -> dict[str, Any]:
    try:
        answer = line.recv()
    except (EOFError, OSError):
        raise ConnectionError(
            f"The process that trained {run.label} died, often for want of memory: the same command goes on from there."
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


@contextmanager
def _workers(count: int) -> Iterator[tuple[list[Any], Any]]:
    """Connections to that many processes, each with one thread, and the event that stops them all."""
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))  # read when a process imports torch
    lines, processes = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, stop), daemon=True)
            process.start()
            theirs.close()
            lines.append(ours)
            processes.append(process)
        yield lines, stop
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        stop.set()
        for line in lines:
            line.close()
        for process in processes:
            process.join(60)


def _work(line: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            run = line.recv()
        except (EOFError, OSError):  # the parent has closed the line, or is gone
            return
        try:
            answer: Any = complete(run, stop)
        except BaseException as error:  # the parent says it, once
            answer = error
        try:
            line.send(answer)
        except OSError:
            return


def complete(run: Run, stop: Any) -> dict[str, Any]:
    """Trains one run to its end and writes its result.json: its measure after the last epoch, None if not finite."""
    from linvit.runs.training import train  # Lightning's start-up belongs into the worker

    run.folder.mkdir(parents=True, exist_ok=True)
    with replacing(run.folder / ASKED) as temporary:
        temporary.write_text(json.dumps(run.values, indent=1))
    reason = None
    started = time.monotonic()
    try:
        train(run.recipe, [f"folder={run.folder}", *run.overrides], True, [StopsBetweenEpochs(stop)], prints=False)
    except FloatingPointError as error:
        reason = str(error).split(",")[0]
    result = {run.measure: None if reason else last(run.folder, run.measure), "reason": reason}
    result["seconds"] = round(time.monotonic() - started, 3)
    (run.folder / "checkpoints" / BEST).unlink(missing_ok=True)  # measured once, at the end: the same as the last
    with replacing(run.folder / RESULT) as temporary:
        temporary.write_text(json.dumps(result))
    return result


def last(folder: Path, measure: str) -> float:
    """A measure of a run after its last epoch; the moving average's where it alone was measured.

    Raises ValueError for a measure that its metrics.csv does not have.
    """
    with (folder / "metrics.csv").open(newline="") as file:
        row = list(csv.DictReader(file))[-1]
    for name in (measure, f"ema_{measure}"):
        if row.get(name):
            return float(row[name])
    known = ", ".join(name.removeprefix("ema_") for name, value in row.items() if value)
    raise ValueError(f"{folder} has no measure {measure!r} after its last epoch, expected one of {known}.")
