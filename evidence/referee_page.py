"""The claims of the referee, and the tables of its page, from the ledgers of its stages and its pilot."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean

import torch

from evidence.claims import found_with, p_above, p_within, power_within
from evidence.published import ROWS, TOP1
from evidence.referee import LADDER, RECIPES, SHOWN, VARIANTS, accuracies, best_rates, planned, read
from evidence.rows import EVIDENCE
from evidence.study_page import p_text
from linvit.analysis.cost import count_cost
from linvit.analysis.markdown import markdown_rows
from linvit.bundled import NETWORKS
from linvit.runs.recipe_values import read_recipe
from linvit.runs.tasks import RUNS
from linvit.studies.table import differences, estimate

NOT_RUN = "Not run yet."


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
        for name in VARIANTS
        if name in measured
    ]
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
    "referee_pilot": pilot_table,
}
"""The names of marks in the page → the table between them."""
