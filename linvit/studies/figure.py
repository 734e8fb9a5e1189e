"""The study as a picture: every variant's accuracies, mean and interval, in groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linvit.studies.statistics import Estimate

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")
LINES = (("#555555", "--"), ("#E69F00", ":"))


@dataclass(frozen=True)
class Dots:
    """A variant in the picture: accuracies in percent, one a seed, NaN where the run did not stay finite."""

    name: str
    group: str
    accuracies: Sequence[float]
    mean: Estimate


def study_figure(dots: Sequence[Dots], baselines: Sequence[str]) -> Figure:
    """One panel a group over a common axis: mean with 95 % interval, the seeds as pale dots, baselines as lines."""
    groups = list(dict.fromkeys(one.group for one in dots))
    members = [[one for one in dots if one.group == group] for group in groups]
    figure = Figure(figsize=(9, 0.9 + 0.27 * sum(len(own) + 1.5 for own in members)), layout="constrained")
    panels = figure.subplots(
        len(groups), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": [len(own) + 0.5 for own in members]}
    )[:, 0]
    for panel, group, own, colour in zip(panels, groups, members, COLOURS * len(groups), strict=False):
        _draw(panel, own, colour)
        panel.set_title(group, loc="left", fontsize=10)
        for name, (tone, style) in zip(baselines, LINES, strict=False):
            line = next((one.mean.mean for one in dots if one.name == name), math.nan)
            panel.axvline(line, color=tone, linestyle=style, linewidth=1, label=name, zorder=0)
    panels[-1].set_xlabel("accuracy on held-out images, %")
    panels[-1].set_xlim(*_limits(dots))
    handles, labels = panels[0].get_legend_handles_labels()
    labels = [f"mean of {label}" for label in labels]
    figure.legend(handles, labels, loc="outside upper right", ncols=2, frameon=False, fontsize=8)
    return figure


def _draw(panel: Axes, own: Sequence[Dots], colour: str) -> None:
    for place, one in enumerate(own):
        finite = [value for value in one.accuracies if math.isfinite(value)]
        if not finite:
            panel.text(
                0.01, place, "no run stayed finite", transform=panel.get_yaxis_transform(), fontsize=8, va="center"
            )
            continue
        panel.plot(finite, [place + 0.24] * len(finite), "o", color=colour, alpha=0.45, markersize=3, markeredgewidth=0)
        ends = [one.mean.low, one.mean.high] if math.isfinite(one.mean.low) else [one.mean.mean] * 2
        panel.plot(ends, [place] * 2, color=colour, linewidth=1.6)
        panel.plot(one.mean.mean, place, "o", color=colour, markersize=6)
    panel.set_yticks(range(len(own)), [_label(one) for one in own], fontsize=8)
    panel.set_ylim(len(own) - 0.4, -0.6)
    panel.grid(axis="x", alpha=0.3)


def _limits(dots: Sequence[Dots]) -> tuple[float, float]:
    """Around every interval, but never beyond what an accuracy can be."""
    shown = [value for one in dots for value in one.accuracies if math.isfinite(value)]
    ends = [end for one in dots for end in (one.mean.low, one.mean.high) if math.isfinite(end)]
    return max(0.0, min([*shown, *ends, 100.0]) - 1), min(100.0, max([*shown, *ends, 0.0]) + 1)


def _label(one: Dots) -> str:
    lost = sum(not math.isfinite(value) for value in one.accuracies)
    return f"{one.name} (NaN in {lost} of {len(one.accuracies)})" if lost else one.name
