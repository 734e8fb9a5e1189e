"""The tables of the pages of designs, from the ledgers of their stages; also the referee's pilot."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import torch

from evidence.claims import found_with, p_above, p_within, power_within
from evidence.design import LADDER, SWEEP_SEEDS, Design, Primary, read
from evidence.designs import DESIGNS, MHLA, RALA, REFEREE, SOFTMAX, TABLE_9, VITTT
from evidence.published import ROWS, TOP1
from evidence.rows import EVIDENCE
from evidence.study_page import p_text
from linvit.analysis.cost import count_cost
from linvit.analysis.markdown import markdown_rows
from linvit.bundled import NETWORKS
from linvit.runs.recipe_values import read_recipe
from linvit.runs.tasks import RUNS
from linvit.studies.table import differences, estimate

NOT_RUN = "Not run yet."
LEVEL, COMPLETE = 0.025, 0.75  # error of a family of claims, share of seeds that must have ended
DEVIATIONS = {"parts": (0.5, 0.7, 1.0, 1.5)}  # of a run, in points; 0.3 to 0.7 in the other designs
PUBLISHED = {  # variant → row, and the network whose cost is counted at 224 px, with its tokens
    "softmax": (SOFTMAX, "deit_tiny_softmax", 197),
    "rala": (RALA, "deit_tiny_rala", 197),
    "mala": (TABLE_9, "deit_tiny_mala", 197),
    "mhla": (MHLA, "deit_tiny_mhla_256", 256),
    "vittt": (VITTT, "vit_ttt_tiny", 196),
}


def numbers(design: Design, when: str = "last") -> dict[str, list[float]]:
    """Variant → accuracy in % of every planned seed; NaN where a run diverged, or is not there yet."""
    rows = read(design.ledger)
    return {
        name: [
            100 * rows.get(f"{name} seed {seed}", {}).get("result", {}).get("inside", {}).get(when, float("nan"))
            for seed in design.planned(name)
        ]
        for name in design.variants
    }


def decide(claim: Primary, gains: Sequence[float], within: float) -> dict[str, float]:
    """What may be said of a gain, with its p-value: more than the bound, within ±within, less than minus the bound."""
    said = {"more": p_above(gains, claim.more), "less": p_above([-gain for gain in gains], claim.more)}
    return {name: min(1.0, 2 * p) for name, p in said.items()} | {"within": p_within(gains, within)}


def verdict(claim: Primary, said: Mapping[str, float], factor: float, within: float) -> str:
    """The words of all that holds at LEVEL, after multiplication by Holm's factor."""
    words = {
        "more": f"at least {claim.more:g} point more" if claim.more else "better",
        "within": f"equal, within ±{within:g}",
        "less": f"at least {claim.more:g} point less" if claim.more else "worse",
    }
    return "; ".join(words[name] for name, p in said.items() if p * factor <= LEVEL) or "undecided"


def seeds_of(design: Design, claim: Primary) -> list[int]:
    """The seeds of a claim: those that both of its variants have."""
    first, second = map(design.planned, claim.pair)
    return [seed for seed in first if seed in second]


class Gain(NamedTuple):
    """The differences of a claim in points, one for each pair of runs that did not diverge.

    seeds: planned pairs. ended: pairs whose runs are in the ledger.
    """

    points: list[float]
    seeds: int
    ended: int


def gains_of(design: Design) -> dict[Primary, Gain]:
    """What the ledger has of each claim."""
    measured, rows = numbers(design), read(design.ledger)
    gains = {}
    for claim in design.claims:
        seeds = seeds_of(design, claim)
        points = differences(*(measured[name][: len(seeds)] for name in claim.pair))
        ended = sum(all(f"{name} seed {seed}" in rows for name in claim.pair) for seed in seeds)
        gains[claim] = Gain(points, len(seeds), ended)
    return gains


def claims_table(design: Design) -> str:
    """The claims with gains, intervals and verdicts; a verdict only when every planned run of its family has ended."""
    gains = gains_of(design)
    cells = []
    for claim, gain in gains.items():
        family = [other for other in design.claims if other.alone == claim.alone]
        said, value = decide(claim, gain.points, design.within), estimate(gain.points)
        least = [min(decide(other, gains[other].points, design.within).values()) for other in family]
        factor = holm_factor(least, family.index(claim))
        final = all(gains[other].ended == gains[other].seeds for other in family)
        outcome = f"{gain.ended} of {gain.seeds} seeds" if gain.ended else "not run yet"
        if final:
            lost = len(gain.points) < COMPLETE * gain.seeds
            words = verdict(claim, said, factor, design.within)
            outcome = "undecided: too many runs diverged" if lost else words
        cells.append(
            {
                "gain": f"`{claim.pair[0]}` − `{claim.pair[1]}`",
                "bound": f"{claim.more:g}",
                "published": published_gain(claim),
                "seeds": str(gain.seeds),
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


def results_table(design: Design) -> str:
    """Accuracy of each variant after the epochs that are noted and the last one, over the seeds that there are."""
    rows, best = read(design.ledger), design.best_rates()
    if not rows:
        return NOT_RUN
    columns = {f"epoch {epoch}": numbers(design, str(epoch)) for epoch in design.shown} | {"last": numbers(design)}
    cells = []
    for name in design.variants:
        runs = [rows[f"{name} seed {seed}"] for seed in design.planned(name) if f"{name} seed {seed}" in rows]
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


def rates_table(design: Design) -> str:
    """The mean held-out accuracy of two seeds at each rate that was tried; that of the chosen rate is bold."""
    tried, best = design.accuracies(), design.best_rates()
    if not tried:
        return NOT_RUN
    used = [rate for rate in LADDER if any(rate in values for values in tried.values())]
    cells = []
    for name in filter(tried.__contains__, design.variants):
        means = {rate: f"{100 * mean(tried[name][rate]):.1f}" if rate in tried[name] else "–" for rate in used}
        if name in best:
            means[best[name]] = f"**{means[best[name]]}**"
        cells.append({"network": f"`{name}`"} | means)
    return markdown_rows(cells, left=1)


def stages_table(design: Design) -> str:
    """What each stage costs at the assumed pace, and how much of it is in the ledger."""
    cells = []
    for stage in design.stages:
        done = read(stage.ledger)
        if stage.seeds:
            names = [f"{name} seed {seed}" for name in stage.variants for seed in stage.seeds]
            epochs, images, each = design.epochs(), design.images, f"{len(stage.seeds)} seeds"
        else:
            rates = product(stage.variants, design.swept, SWEEP_SEEDS)
            names = [f"{name} at {rate} seed {seed}" for name, rate, seed in rates]
            epochs, images = design.sweep_epochs, design.sweep_images
            each = f"{len(design.swept)} rates × {len(SWEEP_SEEDS)} seeds"
        millions, ended = len(names) * epochs * images / 1e6, sum(name in done for name in names)
        cells.append(
            {
                "stage": f"`{stage.name}`",
                "runs": f"{len(stage.variants)} × {each} × {epochs} epochs",
                "million images": f"{millions:.1f}{'' if stage.seeds else ' and more'}",
                f"minutes at {design.assumed:,}/s": f"{1e6 * millions / design.assumed / 60:.0f}",
                "state": f"{ended} of {len(names)} runs" if ended else "not run yet",
            }
        )
    return markdown_rows(cells, left=2)


def pilot_table(ledger: Path = EVIDENCE / "pilot-referee.jsonl") -> str:
    """Losses and accuracy after the pilot's 32 steps, of the weights themselves."""
    measured = {run.partition(" ")[0]: row["result"]["measures"] for run, row in read(ledger).items()}
    cells = [
        {
            "network": f"`{name}`",
            "training loss of the second 16 steps": f"{measured[name]['train_loss']:.3f}",
            "held-out loss": f"{measured[name]['loss']:.3f}",
            "top-1": f"{100 * measured[name]['top1']:.1f} %",
        }
        for name in REFEREE.variants
        if name in measured
    ]
    return markdown_rows(cells, left=1)


@cache
def networks_table(design: Design) -> str:
    """Parameters and MACs of each network; of the referee's also tokens, and the published network that is like it."""
    counted = {row["name"]: row for row in json.loads(NETWORKS.read_text(encoding="utf-8"))["classification"]["rows"]}
    cells = []
    for name in design.variants:
        recipe = read_recipe(design.recipes / f"{name}.yaml")
        with torch.device("meta"):
            built = RUNS["classification"].create_network(recipe["model"], 10, 3)
        cost = count_cost(built, (3, recipe["data"]["size"], recipe["data"]["size"]))
        digits = 1 if cost.macs > 1e7 else 2
        millions = f"{cost.macs / 1e6:.{digits}f} + {cost.macs_attention / 1e6:.{digits}f}"
        row, like = {"network": f"`{name}`"}, dict[str, str]()
        if design is REFEREE:
            row["tokens"] = "64"
            like = dict.fromkeys(("published top-1", "its tokens", "its G MACs, counted"), "–")
            if name in PUBLISHED:
                citation, network, tokens = PUBLISHED[name]
                macs = (counted[network]["macs"] + counted[network]["macs_attention"]) / 1e9
                top1 = f"{ROWS[citation].with_unit(TOP1)} ({ROWS[citation].table})"
                like = dict(zip(like, (top1, str(tokens), f"{macs:.2f}"), strict=True))
        cells.append(row | {"parameters": f"{cost.parameters:,}", "M MACs": millions} | like)
    return markdown_rows(cells, left=1)


def power_table(design: Design) -> str:
    """By the deviation of one run: the gain that is found with a probability of 80 %, and how often equality is."""
    others = [claim for claim in design.claims if not claim.alone]
    families = [("first claim: ", [claim], 1) for claim in design.claims if claim.alone]
    families.append(("strictest of the others: " if families else "", others, len(others)))
    cells = []
    for deviation in DEVIATIONS.get(design.name, (0.3, 0.4, 0.5, 0.7)):
        row, of_pair = {"deviation of a run": f"{deviation:g}"}, deviation * 2**0.5
        for words, claims, share in families:
            count, alpha = min(len(seeds_of(design, claim)) for claim in claims), LEVEL / share
            row[f"{words}gain"] = f"{claims[0].more + found_with(0.8, of_pair, count, alpha):.2f}"
            row[f"{words}equal"] = f"{100 * power_within(design.within, of_pair, count, alpha):.0f} %"
        cells.append(row)
    return markdown_rows(cells, left=0)


ABOUT: dict[str, Callable[[Design], str]] = {
    "networks": networks_table,
    "stages": stages_table,
    "power": power_table,
    "claims": claims_table,
    "results": results_table,
    "rates": rates_table,
}
TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    f"{design.name}_{name}": ("referee" if design is REFEREE else "trainings", partial(table, design))
    for design in DESIGNS.values()
    for name, table in ABOUT.items()
    if (design.claims or name not in ("claims", "power")) and (design is not REFEREE or name != "stages")
} | {"referee_pilot": ("referee", pilot_table)}
"""The names of marks → page, and the table between them."""
