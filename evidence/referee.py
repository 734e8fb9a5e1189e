"""The referee: recent linear attentions and their crossings in one network, by one protocol: its stages and rules.

The page docs/evidence/referee.md explains the design, which is fixed before the first run. Rates and epochs follow from
the ledger of the sweep by the rules here, so that no choice is made between two stages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from evidence.rows import EVIDENCE, ROOT, Call
from linvit.runs.folder import read_curves
from linvit.studies.comparison import Cell, Say, silent
from linvit.studies.pool import Ledger, Training, remaining, run_all

RECIPES = ROOT / "recipes" / "evidence" / "referee"
CROSSED = ("mala", "mala_blocks", "rala", "rala_blocks")
CLAIMED = (*CROSSED, "rala_uniform", "softmax_gated", "mhla", "vittt")
VARIANTS = (*CLAIMED, "softmax", "linear", "nala")
LADDER = ("1.25e-4", "2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3", "16e-3", "32e-3")
SWEPT, BESIDE = LADDER[2:7], 2  # rates that every variant begins with, and those on either side of the best
SWEEP_SEEDS, FIRST = range(2), 100
SWEEP_EPOCHS, SWEEP_IMAGES, IMAGES = 10, 45_000, 50_000
SHOWN = (3, 10)  # epochs after which accuracy is noted too
WORKERS = 16  # runs at once on a GPU
PACE = ((25_000, 30), (12_000, 20), (0, 10))  # images per second of all runs of the sweep → epochs
SCORE = "ema_top1"


@dataclass(frozen=True)
class Stage:
    """Runs that one slot of a GPU completes. seeds: none for the sweep of rates. ledger: their file."""

    name: str
    variants: tuple[str, ...] = VARIANTS
    seeds: range = range(0)
    settings: tuple[str, ...] = ()
    folder: Path = EVIDENCE

    @property
    def ledger(self) -> Path:
        return self.folder / ("referee.jsonl" if self.seeds else "rates-referee.jsonl")

    @property
    def rates(self) -> Path:
        return self.folder / "rates-referee.jsonl"

    def trainings(self) -> list[Training]:
        """The runs that are known so far: those of a sweep grow until every best rate has rates on either side.

        Raises ValueError if a rate is not known yet.
        """
        return list(self._quality() if self.seeds else self._sweep())

    def _quality(self) -> Iterator[Training]:
        best, epochs = best_rates(self.rates), epochs_of(self.rates)
        if lacking := [name for name in self.variants if name not in best]:
            raise ValueError(f"The rates of {len(lacking)} variants are not known yet: run referee_rates first.")
        for seed in self.seeds:
            for name in self.variants:
                settings = (f"optimizer.lr={best[name]}", f"trainer.max_epochs={epochs}", *self.settings)
                yield _cell(name, settings).training(seed, (), ROOT / "runs" / "referee")

    def _sweep(self) -> Iterator[Training]:
        tried = accuracies(self.rates)
        for seed in SWEEP_SEEDS:
            for name in self.variants:
                for rate in to_try(name, tried):
                    short = f"trainer.max_epochs={SWEEP_EPOCHS}", "data.held_out=0.1", f"data.split={seed}"
                    cell = _cell(name, (f"optimizer.lr={rate}", *short, *self.settings), rate)
                    yield cell.training(seed, (), ROOT / "runs" / "rates-referee")

    def train(
        self, workers: int, progress: Say = silent, here: Callable[[Training], Training] = lambda run: run
    ) -> None:
        """Trains what is left. here: adds settings of this machine, which results do not depend on."""
        while True:
            trainings = [here(training) for training in self.trainings()]
            run_all(trainings, workers, progress, lambda measures: f"{measures['top1']:.1%}", Ledger(self.ledger))
            if len(self.trainings()) == len(trainings):
                return

    def run(self, call: Call) -> None:
        """As a row of the table of evidence."""
        extra = tuple(call.settings)
        self.train(call.workers, print, lambda run: replace(run, overrides=(*run.overrides, *extra)))

    def left(self, call: Call) -> str:
        try:
            return remaining(self.trainings(), Ledger(self.ledger))
        except ValueError as error:
            return str(error)


STAGES = (
    Stage("referee_rates"),
    Stage("referee_100", seeds=range(FIRST, FIRST + 4)),
    Stage("referee_104", CLAIMED, range(FIRST + 4, FIRST + 8)),
    Stage("referee_108", CLAIMED, range(FIRST + 8, FIRST + 12)),
    Stage("referee_112", CLAIMED, range(FIRST + 12, FIRST + 16)),
    Stage("referee_116", CROSSED, range(FIRST + 16, FIRST + 20)),
)
"""In this order; each is a case of the job `referee`."""


def _cell(name: str, settings: tuple[str, ...], rate: str | None = None) -> Cell:
    return Cell(RECIPES / f"{name}.yaml", settings, rate, look=curve)


def curve(folder: Path) -> dict[str, float]:
    """The accuracy of the moving average after the epochs SHOWN and the last one, and the last training loss."""
    rows = read_curves(folder)
    noted = {str(epoch): rows[epoch - 1] for epoch in SHOWN if epoch <= len(rows)} | {"last": rows[-1]}
    return {name: row[SCORE] for name, row in noted.items()} | {"epochs": len(rows)}


def read(ledger: Path) -> dict[str, dict[str, Any]]:
    """The rows of a ledger by the names of the runs; none if it does not exist."""
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    return {row["run"]: row for row in map(json.loads, lines)}


def accuracies(rates: Path) -> dict[str, dict[str, list[float]]]:
    """Variant → rate → the held-out accuracies of its seeds; 0 for a run that diverged."""
    shares: dict[str, dict[str, list[float]]] = {}
    for run, row in read(rates).items():
        name, _, rate, *_ = run.split()  # "mala at 2e-3 seed 0"
        shares.setdefault(name, {}).setdefault(rate, []).append(row["result"]["inside"].get("last", 0.0))
    return shares


def best_of(tried: Mapping[str, Sequence[float]]) -> str | None:
    """The rate with the highest mean, the lower of two equal ones; None before all of SWEPT have all seeds."""
    complete = {rate: mean(values) for rate, values in tried.items() if len(values) == len(SWEEP_SEEDS)}
    if not complete.keys() >= set(SWEPT):
        return None
    return max(sorted(complete, key=LADDER.index), key=complete.__getitem__)


def to_try(name: str, tried: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """The rates of a variant: SWEPT and, as far as the ladder goes, two on either side of the best so far."""
    best, wanted = best_of(tried.get(name, {})), {*SWEPT, *tried.get(name, {})}
    if best is not None:
        place = LADDER.index(best)
        wanted |= set(LADDER[max(0, place - BESIDE) : place + BESIDE + 1])
    return sorted(wanted, key=LADDER.index)


def best_rates(rates: Path) -> dict[str, str]:
    """Variant → its rate, of those whose sweep is complete."""
    tried = accuracies(rates)
    return {
        name: best
        for name, values in tried.items()
        if (best := best_of(values)) and all(len(values.get(r, ())) == len(SWEEP_SEEDS) for r in to_try(name, tried))
    }


def epochs_of(rates: Path) -> int:
    """The epochs of the stages after the sweep, by the pace of the sweep: PACE was fixed before it."""
    seconds = [row["result"]["seconds"] for row in read(rates).values() if not row["result"]["reason"]]
    if not seconds:
        return PACE[0][1]
    pace = WORKERS * SWEEP_EPOCHS * SWEEP_IMAGES / mean(seconds)
    return next(epochs for least, epochs in PACE if pace >= least)


def planned(name: str) -> list[int]:
    """The seeds of a variant in all stages."""
    return [seed for stage in STAGES if name in stage.variants for seed in stage.seeds]
