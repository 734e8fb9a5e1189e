"""Figures of recipes trained over seeds: over a varied setting, and in groups one below the other."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linvit.analysis.figures import SMALL, WIDTH, colour_of, colours_of, literal, subplots

if TYPE_CHECKING:
    from linvit.studies.table import Row

LINES = ("--", ":")


def over_figure(rows: Sequence["Row"], key: str, words: str) -> Figure:
    """The measure over the varied setting, one line per recipe: mean with its 95 % interval, seeds as pale dots."""
    figure, axes = subplots((WIDTH, 4))
    values = list(dict.fromkeys(row.value for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    for number, (name, colour) in enumerate(colours_of(names).items()):
        line = [row for row in rows if row.name == name]
        places = [values.index(row.value) + 0.06 * (number - (len(names) - 1) / 2) for row in line]
        axes.plot(places, [row.mean.mean for row in line], color=colour, marker="o", markersize=4, label=literal(name))
        for place, row in zip(places, line, strict=True):
            axes.plot([place] * len(row.measures), row.measures, ".", color=colour, alpha=0.4, markersize=4)
            if math.isfinite(row.mean.low):
                axes.plot([place] * 2, [row.mean.low, row.mean.high], color=colour, linewidth=1)
    axes.set_xticks(range(len(values)), [literal(str(value)) for value in values])
    axes.set(xlabel=literal(key), ylabel=words)
    if words.endswith("%"):
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, -2), min(high, 102))
    axes.legend(frameon=False, fontsize=SMALL)
    return figure


def group_figure(rows: Sequence["Row"], baselines: Sequence[str], words: str) -> Figure:
    """One panel per group over a common axis: mean with 95 % interval, seeds as pale dots, baselines as lines."""
    groups = {group: [row for row in rows if row.group == group] for group in dict.fromkeys(row.group for row in rows)}
    heights = [len(members) for members in groups.values()]
    size = WIDTH, 0.9 + 0.27 * sum(height + 1.5 for height in heights)
    ratios = [height + 0.5 for height in heights]
    figure, grid = subplots(size, len(groups), sharex=True, squeeze=False, height_ratios=ratios)
    panels = grid[:, 0]
    for panel, (group, members) in zip(panels, groups.items(), strict=True):
        _draw_group(panel, members)
        panel.set_title(group, loc="left", fontsize=SMALL)
        for name, style in zip(baselines, LINES, strict=False):
            place = next((row.mean.mean for row in rows if row.name == name), math.nan)
            panel.axvline(
                place, color=colour_of(name), linestyle=style, linewidth=1, label=literal(f"mean of {name}"), zorder=0
            )
    panels[-1].set_xlabel(words)
    panels[-1].set_xlim(*_limits(rows))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=SMALL)
    return figure


def _draw_group(panel: Axes, rows: Sequence["Row"]) -> None:
    for place, row in enumerate(rows):
        colour = colour_of(row.name)
        finite = [value for value in row.measures if math.isfinite(value)]
        if not finite:
            across = panel.get_yaxis_transform()
            panel.text(0.01, place, "no run has a result", transform=across, fontsize=SMALL, va="center")
            continue
        panel.plot(finite, [place + 0.24] * len(finite), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
        ends = [row.mean.low, row.mean.high] if math.isfinite(row.mean.low) else [row.mean.mean] * 2
        panel.plot(ends, [place] * 2, color=colour, linewidth=1.6)
        panel.plot(row.mean.mean, place, "o", color=colour, markersize=6)
    panel.set_yticks(range(len(rows)), [_label(row) for row in rows])
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.grid(visible=False, axis="y")


def _limits(rows: Sequence["Row"]) -> tuple[float, float]:
    """Around every interval, but never beyond the range of a share."""
    ends = [end for row in rows for end in (*row.measures, row.mean.low, row.mean.high) if math.isfinite(end)]
    return max(0.0, min([*ends, 100.0]) - 1), min(100.0, max([*ends, 0.0]) + 1)


def _label(row: "Row") -> str:
    return literal(f"{row.name} ({row.diverged} of {len(row.measures)} diverged)" if row.diverged else row.name)
