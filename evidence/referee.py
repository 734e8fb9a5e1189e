"""The referee: recent linear attentions and their crossings in one network, by one protocol: its stages and tables.

The page docs/evidence/referee.md explains the design, which is fixed before the first run. Rates and epochs follow from
the ledger of the sweep by the rules here, so that no choice is made between two stages.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from evidence.claims import found_with, p_above, p_within, power_within
from evidence.published import ROWS, TOP1
from evidence.rows import EVIDENCE, ROOT, Call
from evidence.study_page import p_text
from linvit.analysis.cost import count_cost
from linvit.analysis.markdown import markdown_rows
from linvit.bundled import NETWORKS
from linvit.runs.folder import read_curves
from linvit.runs.recipe_values import read_recipe
from linvit.runs.tasks import RUNS
from linvit.studies.comparison import Cell, Say, silent
from linvit.studies.pool import Ledger, Training, remaining, run_all
from linvit.studies.table import differences, estimate

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
NOT_RUN = "Not run yet."
SCORE = "ema_top1"

Numbers = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Primary:
    """A claim: the gain of the first of a pair over the second.

    more: points that it has to exceed. alone: whether it has half of the error to itself. source: the two rows of
    published accuracies, or words.
    """

    pair: tuple[str, str]
    more: float = 0.0
    alone: bool = False
    source: str = "nothing published"


WITHIN, ALPHA, COMPLETE = 0.5, 0.05, 0.75  # margin in points, error of all claims, share of seeds that must have ended
TABLE_9 = "MALA, Table 9, DeiT-T with MALA"
MHLA, VITTT = "MHLA (ICLR 2026), Table 2, DeiT-T with MHLA", "ViT³, repository, ViT³-T"
RALA, SOFTMAX = "RALA, Table 8, DeiT-T with RALA", "MALA, Table 9, DeiT-T"
PRIMARY = (
    Primary(("mala_blocks", "mala"), 1.0, alone=True),
    Primary(("rala_blocks", "rala")),
    Primary(("mala", "softmax_gated"), source=f"{TABLE_9}; {SOFTMAX}"),
    Primary(("mala", "rala_uniform"), source="MALA, Section 3.3, without a number"),
    Primary(("rala", "rala_uniform"), source="RALA, Table 9, in a pyramid"),
    Primary(("mhla", "mala"), source=f"{MHLA}; {TABLE_9}"),
    Primary(("vittt", "mala"), source=f"{VITTT}; {TABLE_9}"),
    Primary(("mala_blocks", "mhla")),
)
PUBLISHED = {  # variant → row, and the network whose cost is counted at 224 px, with its tokens
    "softmax": (SOFTMAX, "deit_tiny_softmax", 197),
    "rala": (RALA, "deit_tiny_rala", 197),
    "mala": (TABLE_9, "deit_tiny_mala", 197),
    "mhla": (MHLA, "deit_tiny_mhla_256", 256),
    "vittt": (VITTT, "vit_ttt_tiny", 196),
}


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
            raise ValueError(f"The sweep of rates of {', '.join(lacking)} is not complete: run the stage rates first.")
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


def numbers(ledger: Path, when: str = "last") -> dict[str, list[float]]:
    """Variant → accuracy in % of every planned seed; NaN where a run diverged, or is not there yet."""
    rows = read(ledger)
    return {
        name: [
            100 * rows.get(f"{name} seed {seed}", {}).get("result", {}).get("inside", {}).get(when, float("nan"))
            for seed in planned(name)
        ]
        for name in VARIANTS
    }


def decide(claim: Primary, gains: Sequence[float]) -> dict[str, float]:
    """What may be said of a gain, with its p-value: more than the bound, within ±WITHIN, less than minus the bound."""
    said = {"more": p_above(gains, claim.more), "less": p_above([-gain for gain in gains], claim.more)}
    return {name: min(1.0, 2 * p) for name, p in said.items()} | {"within": p_within(gains, WITHIN)}


def verdict(claim: Primary, said: Mapping[str, float], factor: float) -> str:
    """The words of all that holds at half of ALPHA, after multiplication by Holm's factor."""
    words = {
        "more": f"at least {claim.more:g} point more" if claim.more else "better",
        "within": f"equal, within ±{WITHIN:g}",
        "less": f"at least {claim.more:g} point less" if claim.more else "worse",
    }
    return "; ".join(words[name] for name, p in said.items() if p * factor <= ALPHA / 2) or "undecided"


def claims_table(ledger: Path = EVIDENCE / "referee.jsonl") -> str:
    """The claims with gains, intervals and verdicts; a verdict only when every planned run of its family has ended."""
    measured, rows = numbers(ledger), read(ledger)
    seeds = {claim: [seed for seed in planned(claim.pair[0]) if seed in planned(claim.pair[1])] for claim in PRIMARY}
    gains = {claim: differences(*(measured[name][: len(seeds[claim])] for name in claim.pair)) for claim in PRIMARY}
    done = {
        claim: sum(all(f"{name} seed {seed}" in rows for name in claim.pair) for seed in seeds[claim])
        for claim in PRIMARY
    }
    cells = []
    for claim in PRIMARY:
        family = [other for other in PRIMARY if other.alone == claim.alone]
        said, value = decide(claim, gains[claim]), estimate(gains[claim])
        factor = holm_factor([min(decide(other, gains[other]).values()) for other in family], family.index(claim))
        final = all(done[other] == len(seeds[other]) for other in family)
        outcome = f"{done[claim]} of {len(seeds[claim])} seeds" if done[claim] else "not run yet"
        if final:
            lost = len(gains[claim]) < COMPLETE * len(seeds[claim])
            outcome = "undecided: too many runs diverged" if lost else verdict(claim, said, factor)
        cells.append(
            {
                "gain": f"`{claim.pair[0]}` − `{claim.pair[1]}`",
                "bound": f"{claim.more:g}",
                "published": published_gain(claim),
                "seeds": str(len(seeds[claim])),
                "points": f"{value.mean:+.2f} [{value.low:+.2f}, {value.high:+.2f}]" if value.count > 1 else "–",
                "p": p_text(min(1.0, factor * min(said.values()))) if final else "–",
                "verdict": outcome,
            }
        )
    return markdown_rows(cells, left=3)


def holm_factor(p_values: Sequence[float], place: int) -> float:
    """By how much Holm's procedure multiplies one of the p-values."""
    return len(p_values) - sum(p < p_values[place] for p in p_values)


def published_gain(claim: Primary) -> str:
    """The difference of two published rows with their citations, or what is said instead."""
    rows = [ROWS[name] for name in claim.source.split("; ") if name in ROWS]
    if len(rows) < 2:
        return claim.source
    first, second = (float(row.values[TOP1]) for row in rows)
    return f"{first - second:+.1f} ({'; '.join(f'{row.table}, {row.name}' for row in rows)})"


def results_table(ledger: Path = EVIDENCE / "referee.jsonl") -> str:
    """Accuracy of each variant at 3, 10 and the last epochs, over the seeds that there are."""
    rows, best = read(ledger), best_rates(ledger.with_name("rates-referee.jsonl"))
    if not rows:
        return NOT_RUN
    columns = {f"epoch {epoch}": numbers(ledger, str(epoch)) for epoch in SHOWN} | {"last": numbers(ledger)}
    cells = []
    for name in VARIANTS:
        runs = [rows[f"{name} seed {seed}"] for seed in planned(name) if f"{name} seed {seed}" in rows]
        row = {"network": f"`{name}`", "rate": best.get(name, "–"), "seeds": str(len(runs))}
        row |= {heading: plus_minus(values[name]) for heading, values in columns.items()}
        diverged = sum(run["result"]["reason"] is not None for run in runs)
        seconds = f"{mean(run['result']['seconds'] for run in runs):.0f}" if runs else "–"
        cells.append(row | {"diverged": str(diverged), "s per run": seconds})
    return markdown_rows(cells, left=1)


def plus_minus(values: Sequence[float]) -> str:
    finite = [value for value in values if value == value]
    if not finite:
        return "–"
    value = estimate(finite)
    return f"{value.mean:.2f} ± {value.high - value.mean:.2f}" if value.count > 1 else f"{value.mean:.2f}"


def rates_table(rates: Path = EVIDENCE / "rates-referee.jsonl") -> str:
    """The mean held-out accuracy of two seeds at each rate that was tried; that of the chosen rate is bold."""
    tried, best = accuracies(rates), best_rates(rates)
    if not tried:
        return NOT_RUN
    used = [rate for rate in LADDER if any(rate in values for values in tried.values())]
    cells = []
    for name in filter(tried.__contains__, VARIANTS):
        means = {rate: f"{100 * mean(tried[name][rate]):.1f}" if rate in tried[name] else "–" for rate in used}
        if name in best:
            means[best[name]] = f"**{means[best[name]]}**"
        cells.append({"network": f"`{name}`"} | means)
    return markdown_rows(cells, left=1)


@cache
def networks_table() -> str:
    """Tokens, parameters and MACs of each network here, beside those of the published one that is like it."""
    counted = {row["name"]: row for row in json.loads(NETWORKS.read_text(encoding="utf-8"))["classification"]["rows"]}
    cells = []
    for name in VARIANTS:
        with torch.device("meta"):
            built = RUNS["classification"].create_network(read_recipe(RECIPES / f"{name}.yaml")["model"], 10, 3)
        cost = count_cost(built, (3, 32, 32))
        millions = f"{cost.macs / 1e6:.1f} + {cost.macs_attention / 1e6:.1f}"
        row = {"network": f"`{name}`", "tokens": "64", "parameters": f"{cost.parameters:,}", "M MACs": millions}
        like = dict.fromkeys(("published top-1", "its tokens", "its G MACs, counted"), "–")
        if name in PUBLISHED:
            citation, network, tokens = PUBLISHED[name]
            macs = (counted[network]["macs"] + counted[network]["macs_attention"]) / 1e9
            top1 = f"{ROWS[citation].with_unit(TOP1)} ({ROWS[citation].table})"
            like = dict(zip(like, (top1, str(tokens), f"{macs:.2f}"), strict=True))
        cells.append(row | like)
    return markdown_rows(cells, left=1)


def power_table() -> str:
    """By the deviation of one run: the gain that is found with a probability of 80 %, and how often equality is."""
    cells = []
    for deviation in (0.3, 0.4, 0.5, 0.7):
        row, of_pair = {"deviation of a run": f"{deviation:g}"}, deviation * 2**0.5
        for words, name, share, more in (
            ("first claim", "mala", 1, PRIMARY[0].more),
            ("strictest of the others", "mhla", len(PRIMARY) - 1, 0.0),
        ):
            count, alpha = len(planned(name)), ALPHA / 2 / share
            row[f"{words}: gain"] = f"{more + found_with(0.8, of_pair, count, alpha):.2f}"
            row[f"{words}: equal"] = f"{100 * power_within(WITHIN, of_pair, count, alpha):.0f} %"
        cells.append(row)
    return markdown_rows(cells, left=0)


TABLES: dict[str, Callable[[], str]] = {
    "referee_networks": networks_table,
    "referee_power": power_table,
    "referee_claims": claims_table,
    "referee_results": results_table,
    "referee_rates": rates_table,
}
"""The names of marks in the page → the table between them."""
