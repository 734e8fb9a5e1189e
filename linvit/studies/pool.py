"""Many short trainings, a few at a time, each in a worker process with one thread, and the file of finished ones.

A training is complete when its folder contains result.json. Complete trainings are not repeated, unfinished ones resume
from their last checkpoint, and divergence (a loss that is not finite) is a result.
"""

import gc
import hashlib
import json
import math
import multiprocessing
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from linvit import environment
from linvit.bundled import header
from linvit.environment import end_with_parent, forks_of
from linvit.errors import SettingError
from linvit.files import BEST, explained, user_path, write_text
from linvit.runs.folder import RunStoppedError, read_curves

UNMEASURED = ("epoch", "step", "lr", "seconds")  # columns of metrics.csv
SETTINGS, RESULT = "settings.json", "result.json"
OF_THE_MACHINE = {  # settings that may differ
    "data": {"root", "cache", "num_workers"},
    "task": {"compile", "cpp", "recompute"},
    "trainer": {"accelerator"},
}


class Ledger:
    """The finished runs of a comparison or study, one JSON line each: run, settings, commit, machine, result.

    path: the file, which need not exist yet. settings: a digest of all values of the run's recipe but its folder and
    OF_THE_MACHINE. What decides a result beside the recipe's name can be read too: lr, clip (the largest norm of the
    gradients, or null), kernel ("cpp" or the operator's own choice, "auto"), processor, machine.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self._rows: dict[str, dict[str, Any]] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            damaged = f"{self.path}, line {number} is not a finished run: correct or remove the line."
            with explained(damaged, (ValueError, TypeError, KeyError)):
                row = json.loads(line)
                row["settings"], row["result"]["measures"]
                self._rows[row["run"]] = row

    def result(self, run: str, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result of a finished run, None if it is not there."""
        row = self._rows.get(run)
        if row is None:
            return None
        if row["settings"] != digest(values):
            raise SettingError(
                f"{self.path} has the run {run!r} with other settings: remove its line to train again, or choose"
                " another `ledger`."
            )
        return row["result"]

    def origins(self, runs: Iterable[str]) -> dict[str, list[str]]:
        """Where these finished runs were trained: `commits`, `machines` and versions of `torch`, each once, sorted."""
        rows = [self._rows[run] for run in runs]
        return {
            "commits": sorted({row.get("commit") or "unknown" for row in rows}),
            "machines": sorted({", ".join(row["machine"]) for row in rows}),
            "torch": sorted({row["torch"] for row in rows}),
        }

    def add(self, run: str, values: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Adds a finished run and writes the file, runs in alphabetical order."""
        machine = environment.describe(1, 1)
        optimizer, task, trainer = (values.get(group, {}) for group in ("optimizer", "task", "trainer"))
        self._rows[run] = {
            "run": run,
            "settings": digest(values),
            "lr": optimizer.get("lr"),
            "clip": trainer.get("gradient_clip_val"),
            "kernel": "cpp" if task.get("cpp") else "auto",
            "processor": environment.processor(),
            "commit": machine["commit"],
            "machine": machine["devices"],
            "torch": machine["packages"]["torch"],
            "result": dict(result),
        }
        lines = [json.dumps(self._rows[name]) for name in sorted(self._rows)]
        write_text(self.path, "\n".join([*lines, ""]))


def digest(values: Mapping[str, Any]) -> str:
    """A hash of a recipe's values that is the same on every machine."""
    content = {**values, "folder": ""}
    for name, free in OF_THE_MACHINE.items():
        given = content.pop(name, {})
        kept = {key: value for key, value in given.items() if key not in free} if isinstance(given, Mapping) else given
        if kept:  # a group with nothing else is as good as none
            content[name] = kept
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Training:
    """One run: its recipe with overrides, its folder, a label for messages, and all recipe values but `folder`.

    look: measures inside the trained network, from its folder.
    """

    label: str
    recipe: Path
    overrides: tuple[str, ...]
    folder: Path
    values: Mapping[str, Any]
    trusted: bool = False
    look: Callable[[Path], Mapping[str, float]] | None = None

    def result(self) -> dict[str, Any] | None:
        """The result of the complete training, see `complete`; None if it is not complete."""
        settings = self.folder / SETTINGS
        if settings.is_file() and json.loads(settings.read_text()) != self.values:
            raise SettingError(
                f"{self.folder} contains a run with other settings than {self.recipe}: delete that folder to"
                " train again, or choose another `folder`."
            )
        result = self.folder / RESULT
        return json.loads(result.read_text()) if result.is_file() else None


class StopsBetweenEpochs(Callback):
    """Stops a run at the start of an epoch once `stop` is set; the last complete epoch is already saved."""

    def __init__(self, stop: Any) -> None:
        self.stop = stop

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to the parent and to every worker

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.stop.is_set():
            raise RunStoppedError


def run_all(
    trainings: Sequence[Training],
    workers: int,
    say: Callable[[str], None],
    outcome: Callable[[Mapping[str, Any]], str] = lambda measures: "complete",
    ledger: Ledger | None = None,
) -> list[dict[str, Any]]:
    """Completes every training and returns the results in order.

    Args:
        trainings: the runs; complete ones are not repeated.
        workers: how many processes train at once, one thread each.
        say: called with a line whenever a training is complete.
        outcome: measures → their words in that line.
        ledger: runs in it are not repeated, and each finished one is added.

    Raises ValueError if a folder contains another run, RunStoppedError after Ctrl-C, ConnectionError if a worker was
    killed.
    """
    results = [_known(training, ledger) for training in trainings]
    finished = [result for result in results if result is not None]
    if len(finished) == len(trainings):
        return finished
    waiting = [index for index, result in enumerate(results) if result is None]
    number, trained, started = len(trainings), 0, time.monotonic()
    if finished:
        left = math.ceil(mean(result["seconds"] for result in finished) * len(waiting) / workers / 60)
        say(f"{len(finished)} of {number} runs are complete; about {left} min left")
    with _workers(min(workers, len(waiting))) as (pools, stop):
        idle, busy = list(pools), dict[Future[dict[str, Any]], tuple[ProcessPoolExecutor, int]]()
        try:
            while waiting or busy:
                while idle and waiting:
                    pool, index = idle.pop(0), waiting.pop(0)
                    busy[pool.submit(_complete, trainings[index])] = pool, index
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    pool, index = busy.pop(future)
                    idle.append(pool)
                    training = trainings[index]
                    results[index] = result = _result_of(future, training)
                    if ledger is not None:
                        ledger.add(training.label, training.values, result)
                    trained += 1
                    complete = len(finished) + trained
                    words = "diverged" if result["reason"] else outcome(result["measures"])
                    facts = [f"[{complete}/{number}] {training.label}: {words}, {result['seconds']:.0f} s"]
                    if busy:
                        facts.append(f"running: {', '.join(trainings[other].label for _, other in busy.values())}")
                    if complete < number:
                        left = math.ceil((time.monotonic() - started) / trained * (number - complete) / 60)
                        facts.append(f"about {left} min left")
                    say("; ".join(facts))
        except KeyboardInterrupt:
            say("Stopping after the current epoch of each run; press Ctrl-C again to stop at once.")
            raise RunStoppedError(
                f"Stopped with {len(finished) + trained} of {number} runs complete: start it again to resume."
            ) from None
        finally:
            stop.set()
            with suppress(KeyboardInterrupt):
                wait(busy)
    return results  # type: ignore[return-value]


def remaining(trainings: Sequence[Training], ledger: Ledger | None = None) -> str:
    """How many runs are complete, and how long the others take on one core; nothing is trained.

    The time is that of the complete runs of the same recipe; without any, what the recipe's header says before a
    parenthesis.
    """
    results = [(training, _known(training, ledger)) for training in trainings]
    taken: dict[Path, list[float]] = {}
    for training, result in results:
        if result is not None:
            taken.setdefault(training.recipe, []).append(result["seconds"])
    missing = [training.recipe for training, result in results if result is None]
    facts = [f"{len(trainings) - len(missing)} of {len(trainings)} runs are complete"]
    if hours := sum(mean(taken[recipe]) for recipe in missing if recipe in taken) / 3600:
        facts.append(f"about {hours:.1f} hours of one core left")
    costs = Counter(header(recipe)["cost"].partition(" (")[0] for recipe in missing if recipe not in taken)
    return "; ".join([*facts, *(f"{count} × {cost}" for cost, count in costs.items())])


def _known(training: Training, ledger: Ledger | None) -> dict[str, Any] | None:
    """The result of a finished run, from the ledger or its folder; None if it has to be trained."""
    if ledger is None:
        return training.result()
    result = ledger.result(training.label, training.values)
    if result is None and (result := training.result()) is not None:
        ledger.add(training.label, training.values, result)
    return result


def _result_of(future: "Future[dict[str, Any]]", training: Training) -> dict[str, Any]:
    try:
        return future.result()
    except BrokenProcessPool:
        raise ConnectionError(
            f"The worker training {training.label} was killed, often because it ran out of memory: start it again to"
            " resume, with fewer `workers`. A script must make this call under `if __name__ == '__main__':`."
        ) from None


@contextmanager
def _workers(count: int) -> Iterator[tuple[list[ProcessPoolExecutor], Any]]:
    """Executors with one process each, so that a killed process identifies its training, and the event to stop."""
    context = forks_of("linvit.runs.training")
    stop = context.Event()
    others = multiprocessing.active_children()
    pools = [ProcessPoolExecutor(1, context, _begin_worker, (stop,)) for _ in range(count)]
    try:
        yield pools, stop
    finally:
        for process in set(multiprocessing.active_children()) - set(others):
            process.kill()  # it is idle, or Ctrl-C was pressed twice
        for pool in pools:
            pool.shutdown()


_stop: Any = None


def _begin_worker(stop: Any) -> None:
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    torch.set_num_threads(1)


def _complete(training: Training) -> dict[str, Any]:
    return complete(training, _stop)


def complete(training: Training, stop: Any) -> dict[str, Any]:
    """Trains to the end, writes result.json and returns its content.

    The content: `measures` after the last epoch, `seconds`, with those of epochs before a stop, `reason`, why the run
    diverged (else None), and `inside`, what `training.look` returns.
    """
    from linvit.runs.training import train_folder  # the worker imports it, not its parent

    training.folder.mkdir(parents=True, exist_ok=True)
    write_text(training.folder / SETTINGS, json.dumps(training.values, indent=1))
    reason = None
    started = time.monotonic() - sum(row["seconds"] for row in read_curves(training.folder))
    try:
        train_folder(
            training.recipe,
            training.overrides,
            folder=training.folder,
            resume=True,
            trust_recipe=training.trusted,
            callbacks=[StopsBetweenEpochs(stop)],
        )
    except FloatingPointError as error:
        reason = str(error).split(",")[0]
    gc.collect()  # trainer, task and data refer to each other, and a worker trains many runs
    seconds = round(time.monotonic() - started, 3)
    measures = {} if reason else last_measures(training.folder)
    inside = training.look(training.folder) if training.look and not reason else {}
    result: dict[str, Any] = {"reason": reason, "seconds": seconds, "measures": measures, "inside": inside}
    (training.folder / "checkpoints" / BEST).unlink(missing_ok=True)  # the last epoch is compared, not the best
    write_text(training.folder / RESULT, json.dumps(result))  # NaN stays
    return result


def last_measures(folder: Path) -> dict[str, float]:
    """The measures of a run after its last epoch; those of the moving average if nothing else was measured."""
    row = {name: value for name, value in read_curves(folder)[-1].items() if name not in UNMEASURED}
    averaged = {name.removeprefix("ema_"): value for name, value in row.items() if name.startswith("ema_")}
    return averaged | {name.removeprefix("val_"): value for name, value in row.items() if not name.startswith("ema_")}
