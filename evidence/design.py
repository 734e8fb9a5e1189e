"""A design of trainings that decide something: variants, a sweep of rates, stages of seeds, claims, and their rules.

The designs are in `evidence.designs`; each is fixed before its first run. Rates and epochs follow from the ledger of
the sweep by the rules here, so that no choice is made between two stages.
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

LADDER = ("1.25e-4", "2.5e-4", "5e-4", "1e-3", "2e-3", "4e-3", "8e-3", "16e-3", "32e-3", "64e-3")
BESIDE = 2  # rates on either side of the best
SWEEP_SEEDS = range(2)
SCORE = "ema_top1"

Seeds = tuple[tuple[str, ...], range]
"""Variants, and the seeds with which one stage trains each of them."""


@dataclass(frozen=True)
class Primary:
    """A claim: the gain of the first of a pair over the second.

    more: points that it has to exceed. alone: whether it is a family by itself. source: the two rows of published
    accuracies, or words.
    """

    pair: tuple[str, str]
    more: float = 0.0
    alone: bool = False
    source: str = "nothing published"


@dataclass(frozen=True)
class Design:
    """What is trained, and by which rules.

    Args:
        name: Of its job, its ledgers and its folder in recipes/evidence; its stages' names begin with it.
        data: What `evidence.gpu.data` unpacks: its recipes' `data.root` is the folder of this name in `data`.
        images: Training images.
        seeds: Variants and seeds of the stages after the sweep; the first has all variants.
        swept: Rates that every variant begins with.
        ladder: Rates that may follow.
        sweep_epochs: Epochs of the sweep, on nine tenths of the images.
        held_out: Settings of the sweep that hold a tenth of the training images out.
        shown: Epochs after which accuracy is noted too.
        pace: Images per second of all runs of the sweep → epochs.
        assumed: Images per second that the page's costs assume.
        claims: The primary ones.
        within: Points within which two accuracies count as equal.
        workers: Runs at once on a GPU.
        ahead: Epochs of augmented images that are kept beyond the slowest run with a seed; None keeps all.
        settings, folder: Of toys and tests: settings of every run, and the folder of the ledgers.
    """

    name: str
    data: str
    images: int
    seeds: tuple[Seeds, ...]
    swept: tuple[str, ...]
    sweep_epochs: int
    shown: tuple[int, ...]
    pace: tuple[tuple[int, int], ...]
    assumed: int
    claims: tuple[Primary, ...] = ()
    within: float = 0.5
    held_out: tuple[str, ...] = ("data.held_out=0.1",)
    ladder: tuple[str, ...] = LADDER
    workers: int = 16
    ahead: int | None = None
    settings: tuple[str, ...] = ()
    folder: Path = EVIDENCE

    @property
    def recipes(self) -> Path:
        return ROOT / "recipes" / "evidence" / self.name

    @property
    def variants(self) -> tuple[str, ...]:
        return self.seeds[0][0]

    @property
    def ledger(self) -> Path:
        return self.folder / f"{self.name}.jsonl"

    @property
    def rates(self) -> Path:
        return self.folder / f"rates-{self.name}.jsonl"

    @property
    def stages(self) -> "tuple[Stage, ...]":
        """In this order; each is a case of the design's job."""
        named = (Stage(self, f"{self.name}_{seeds[0]}", variants, seeds) for variants, seeds in self.seeds)
        return Stage(self, f"{self.name}_rates", self.variants), *named

    def planned(self, name: str) -> list[int]:
        """The seeds of a variant in all stages."""
        return [seed for variants, seeds in self.seeds if name in variants for seed in seeds]

    def accuracies(self) -> dict[str, dict[str, list[float]]]:
        """Variant → rate → the held-out accuracies of its seeds; 0 for a run that diverged."""
        shares: dict[str, dict[str, list[float]]] = {}
        for run, row in read(self.rates).items():
            name, _, rate, *_ = run.split()  # "mala at 2e-3 seed 0"
            shares.setdefault(name, {}).setdefault(rate, []).append(row["result"]["inside"].get("last", 0.0))
        return shares

    def best_of(self, tried: Mapping[str, Sequence[float]]) -> str | None:
        """The rate with the highest mean, the lower of two equal ones; None before all of `swept` have all seeds."""
        complete = {rate: mean(values) for rate, values in tried.items() if len(values) == len(SWEEP_SEEDS)}
        if not complete.keys() >= set(self.swept):
            return None
        return max(sorted(complete, key=self.ladder.index), key=complete.__getitem__)

    def to_try(self, name: str, tried: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
        """The rates of a variant: `swept` and, as far as the ladder goes, two on either side of the best so far."""
        best, wanted = self.best_of(tried.get(name, {})), {*self.swept, *tried.get(name, {})}
        if best is not None:
            place = self.ladder.index(best)
            wanted |= set(self.ladder[max(0, place - BESIDE) : place + BESIDE + 1])
        return sorted(wanted, key=self.ladder.index)

    def best_rates(self) -> dict[str, str]:
        """Variant → its rate, of those whose sweep is complete."""
        tried = self.accuracies()
        return {
            name: best
            for name, values in tried.items()
            if (best := self.best_of(values))
            and all(len(values.get(rate, ())) == len(SWEEP_SEEDS) for rate in self.to_try(name, tried))
        }

    def epochs(self) -> int:
        """The epochs of the stages after the sweep, by the pace of the sweep: `pace` was fixed before it."""
        seconds = [row["result"]["seconds"] for row in read(self.rates).values() if not row["result"]["reason"]]
        if not seconds:
            return self.pace[0][1]
        pace = self.workers * self.sweep_epochs * self.sweep_images / mean(seconds)
        return next(epochs for least, epochs in self.pace if pace >= least)

    @property
    def sweep_images(self) -> int:
        return self.images * 9 // 10

    def curve(self, folder: Path) -> dict[str, float]:
        """The accuracy of the moving average after the epochs `shown` and the last one."""
        rows = read_curves(folder)
        noted = {str(epoch): rows[epoch - 1] for epoch in self.shown if epoch <= len(rows)} | {"last": rows[-1]}
        return {name: row[SCORE] for name, row in noted.items()} | {"epochs": len(rows)}


@dataclass(frozen=True)
class Stage:
    """Runs that a slot of a GPU completes. seeds: none for the sweep of rates."""

    design: Design
    name: str
    variants: tuple[str, ...]
    seeds: range = range(0)

    @property
    def ledger(self) -> Path:
        return self.design.ledger if self.seeds else self.design.rates

    @property
    def workers(self) -> int:
        """Runs at once: where images are made just ahead of all runs with a seed, these have to run together."""
        workers, together = self.design.workers, len(self.variants)
        return workers // together * together if self.seeds and self.design.ahead is not None else workers

    def trainings(self) -> list[Training]:
        """The runs that are known so far: those of a sweep grow until every best rate has rates on either side.

        Raises ValueError if a rate is not known yet.
        """
        return list(self._quality() if self.seeds else self._sweep())

    def _quality(self) -> Iterator[Training]:
        best, epochs = self.design.best_rates(), self.design.epochs()
        if lacking := [name for name in self.variants if name not in best]:
            rates = self.design.stages[0].name
            raise ValueError(f"The rates of {len(lacking)} variants are not known yet: run {rates} first.")
        for seed in self.seeds:
            for name in self.variants:
                settings = f"optimizer.lr={best[name]}", f"trainer.max_epochs={epochs}"
                yield self._cell(name, settings).training(seed, (), ROOT / "runs" / self.design.name)

    def _sweep(self) -> Iterator[Training]:
        tried = self.design.accuracies()
        for seed in SWEEP_SEEDS:
            for name in self.variants:
                for rate in self.design.to_try(name, tried):
                    short = (
                        f"optimizer.lr={rate}",
                        f"trainer.max_epochs={self.design.sweep_epochs}",
                        *self.design.held_out,
                        f"data.split={seed}",
                    )
                    cell = self._cell(name, short, rate)
                    yield cell.training(seed, (), ROOT / "runs" / f"rates-{self.design.name}")

    def _cell(self, name: str, settings: tuple[str, ...], rate: str | None = None) -> Cell:
        recipe = self.design.recipes / f"{name}.yaml"
        return Cell(recipe, (*settings, *self.design.settings), rate, look=self.design.curve)

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


def read(ledger: Path) -> dict[str, dict[str, Any]]:
    """The rows of a ledger by the names of the runs; none if it does not exist."""
    lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
    return {row["run"]: row for row in map(json.loads, lines)}
