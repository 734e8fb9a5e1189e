"""What the study's trained networks look like inside: numbers for the claims, a table, figures of the first seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from linvit.analysis.figures import write_figure
from linvit.runs.restore import restore, source_for
from linvit.studies.networks import Looked, look, rank_comparison, score_comparison, summarize
from linvit.studies.page import markdown_table, plus_minus
from linvit.studies.statistics import estimate
from linvit.tasks.checkpoints import LAST

MEASURED = (
    "softmax", "softmax_gated", "linear", "efficient", "enhanced", "focused",
    "rala_wide", "rala_uniform", "rala", "mala", "rala_mala",
)  # fmt: skip
IMAGES = 64
FIGURES = {"study_ranks": rank_comparison, "study_scores": score_comparison}
COLUMNS = {
    "state_rank": "state, rank",
    "state_effective": "effective",
    "mixed_rank": "operator, rank",
    "mixed_effective": "effective",
    "output_rank": "features, rank",
    "output_effective": "effective",
    "entropy": "entropy, nats",
    "negative_share": "negative scores, %",
}
ABOUT = """Means over layers, heads and {images} held-out images, ± a 95 % t-interval over {seeds} seeds; heads are
{width} wide, so no rank is larger. Rank: singular values above 1 % of the largest; effective: exp of their entropy.
State: the KV buffer; operator: what it returns, before local term and modulation; features: after both, class token
left out. Entropy and negative scores: of the whole matrix, with the rotation where there is one. Figures: seed 0, over
the layers."""

Numbers = dict[str, dict[str, list[float]]]


def measure_networks(
    folder: Path, results: Mapping[str, Sequence[Mapping[str, object]]], say: Callable[[str], None]
) -> tuple[Numbers, dict[str, Looked]]:
    """Numbers by quantity, variant and seed (NaN where a run did not stay finite), and the measurements of seed 0."""
    numbers: Numbers = {}
    first: dict[str, Looked] = {}
    for name in (name for name in MEASURED if name in results):
        say(f"Looking into the {len(results[name])} networks of {name}")
        for seed, result in enumerate(results[name]):
            found = {}
            if result["top1"] is not None:
                looked = _look(folder / name / f"seed{seed}")
                found = summarize(looked)
                if seed == 0:
                    first[name] = looked
            for quantity in COLUMNS:
                numbers.setdefault(quantity, {}).setdefault(name, []).append(found.get(quantity, math.nan))
    return numbers, first


def _look(run: Path) -> Looked:
    restored = restore(run / "checkpoints" / LAST)
    data = source_for(restored, None).val_set()
    images = torch.stack([data[index][0] for index in range(min(IMAGES, len(data)))])
    return look(restored.task.network.eval(), images)


def write_figures(folder: Path, first: Mapping[str, Looked]) -> list[str]:
    """Writes the figures as PNG and SVG and returns the names of the SVG files; none without networks."""
    if not first:
        return []
    for name, draw in FIGURES.items():
        write_figure(draw(first), folder / name)
    return [f"{name}.svg" for name in FIGURES]


def section(numbers: Numbers, first: Mapping[str, Looked], pictures: Sequence[str]) -> str:
    """The heading, table and figures of the trained networks, as Markdown; nothing where none of seed 0 is finite."""
    if not first:
        return ""
    names = list(numbers["entropy"])
    rows = [[f"`{name}`", *(_cell(numbers[quantity][name], quantity) for quantity in COLUMNS)] for name in names]
    layer = next(iter(first.values())).ranks[0].layer
    about = ABOUT.format(images=IMAGES, seeds=len(numbers["entropy"][names[0]]), width=layer.width)
    shown = "\n".join(f"![Inside the networks trained with seed 0]({name})" for name in pictures)
    table = markdown_table(["network", *COLUMNS.values()], rows, left=1)
    return "\n\n".join(["### Inside the trained networks", " ".join(about.split()), table, shown])


def _cell(values: Sequence[float], quantity: str) -> str:
    factor, digits = (100, 1) if quantity == "negative_share" else (1, 2 if quantity == "entropy" else 1)
    return plus_minus(estimate([factor * value for value in values if math.isfinite(value)]), digits)
