"""Figures of attention layers: ranks, score maps, measures of the scores, the query's magnitude."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray
from torch import Tensor

from linvit.analysis import figures
from linvit.analysis.figures import SMALL, WIDTH, integer_ticks, literal, panel_grid, plain_ticks
from linvit.analysis.magnitude import LOG_RATIO, PAPER_SCALE, READOUTS, SORTED
from linvit.analysis.measured import Layer, Measured, select
from linvit.analysis.probe import LOCAL, MIXED, MODULATED
from linvit.analysis.rank import MATRICES, SPECTRUM, STATE, TOLERANCES
from linvit.analysis.scores import Map, evenly

PAPER_SCALE_COLOUR = "#66C2A5"
MATRIX_COLOURS = {STATE: "#CC79A7", MIXED: "#0072B2", LOCAL: "#E69F00", MODULATED: "#009E73"}
MATRIX_LABELS = {
    STATE: "KV state",
    MIXED: "attention's output",
    LOCAL: "+ local term (LePE)",
    MODULATED: "× gate φ(x)",
}
RANK_TITLES = {
    "rank": "rank, torch's default\nfor float32",
    "rank_1e-3": "rank, σ > 10⁻³ σ₁",
    "rank_1e-2": "rank, σ > 10⁻² σ₁",
    "effective": "effective rank\nexp H(σ/Σσ)",
    "stable": "stable rank\nΣσ²/σ₁²",
}
SCORE_TITLES = {
    "entropy_share": "entropy of |A|/Σ|A|\nover log N",
    "negative_share": "entries below zero, %",
    "negative_mass": "share of Σ|A| below zero, %",
    "row_sum": "sum of each row",
}
MAGNITUDE_TITLES = {
    "entropy_share": SCORE_TITLES["entropy_share"],
    "negative_share": SCORE_TITLES["negative_share"],
    "largest": "largest |A|/Σ|A|",
    LOG_RATIO: "p: score of the best key\nover the upper quartile's",
}
PERCENT = ("negative_share", "negative_mass")
MOST_LAYERS, MOST_MAPS = 12, 4
SHOWN_FACTORS = (0.25, 1.0, 4.0, 16.0, 64.0)
SHADES = ("#C6DBEF", "#6BAED6", "#2171B5", "#E6550D", "#7F2704")
HIGHEST_RATIO = 1e4

ABOUT_RANK = """Each line is the mean over images and heads, shaded by one standard deviation. KV state: the matrix Σ_j
α_j Rκ(k_j) ⊗ v_j that all queries read, head width × head width (softmax attention has none). The other matrices are
tokens × head width, without the class token: the operator's output, then with the local term, then times the gate, if
the layer has them. Singular values are computed in float64 from float32 activations. The papers do not state a
tolerance, and the rank depends on it, so several are shown; the first is max(rows, columns) · 1.2·10⁻⁷ of the largest
singular value."""
ABOUT_SPECTRUM = """Singular values of the same matrices relative to the largest one, mean over images and heads. A
steep curve means low rank; the rank at 10⁻² or 10⁻³ is where the curve crosses the dotted line."""
ABOUT_SCORE_MAPS = """The scores of one query (the dot) over the image, mean over heads, without the class token. Red
is positive, blue is negative, and zero shows the grey image. Each map has its own scale: an evenly red map attends to
all tokens equally."""
ABOUT_SCORES = """Measures of the rows of the score matrix A (at most 512, evenly chosen), class token included. Dots
are means, bars one standard deviation over images and heads. The entropy is that of |A|/Σ|A|, because a row with
negative entries is not a distribution; 1 means that all tokens count equally. If a mechanism rotates queries and keys
only in the numerator, rows need not sum to one, and the rotation alone can make entries negative: hollow dots are
without it."""
ABOUT_READOUTS = """Queries and keys of {layer}, without rotation, under four mechanisms: softmax, vanilla linear
attention, MALA as released (similarity times 1/(N·√width)) and MALA as in the paper (without that factor). The upper
four panels show each query's scores from the largest to the smallest after κ(q) (for softmax, q) is multiplied by a;
mean over 64 queries per image and all heads. These relations are exact: linear attention does not depend on a; MALA's
scores are affine in a; softmax's ratio p becomes p^a. MALA's p saturates at (σ_m - mean)/(σ_n - mean), and keys below
the mean similarity get negative scores."""
ABOUT_MAGNITUDE = """Every layer with its own mechanism, rotation and feature map. Its queries are multiplied by a, its
token weights are not changed; deeper layers are darker. p is the score of the best key over that of the key at the
upper quartile, median over queries. Queries for which one of the two is not positive at every a are left out, and so
are layers without any other query. In attention with unit-norm queries, the queries are multiplied after they are
normalized."""

Item = TypeVar("Item")
_Curve = tuple[Sequence[Measured], str, float, str | None]
"""Measurements, colour, opacity and label of a line."""


def colour_of(mechanism: str) -> str:
    """The mechanism's colour in every figure."""
    return PAPER_SCALE_COLOUR if mechanism == PAPER_SCALE else figures.colour_of(mechanism)


def rank_figure(measured: Sequence[Measured]) -> Figure:
    """A panel for each measure of rank over the layers, with a line for each matrix, shaded by one standard deviation.

    measured: from `measure_ranks`. Dashed line: the largest possible rank; squares: the layer's mechanism.
    """
    layers = layers_of(measured)
    figure, panels = panel_grid(len(RANK_TITLES), 3, 2.5)
    full = [min(layer.width, layer.grid[0] * layer.grid[1]) for layer in layers]
    for axes, (measure, title) in zip(panels, RANK_TITLES.items(), strict=True):
        for matrix in MATRICES:
            entries, colour = select(measured, matrix=matrix), MATRIX_COLOURS[matrix]
            x = np.array([1 + layers.index(entry.layer) for entry in entries])
            mean, deviation = _statistics(entries, measure)
            axes.plot(x, mean, color=colour, marker=".", linewidth=1.2)
            axes.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
        axes.set_ylim(0, 1.06 * max(full) if measure in TOLERANCES else None)
        axes.step(range(1, len(layers) + 1), full, where="mid", color="#999999", linestyle="--", scaley=False)
        for number, layer in enumerate(layers, start=1):
            foot = axes.get_xaxis_transform()
            axes.plot(number, 0.02, "s", transform=foot, color=colour_of(layer.mechanism), markersize=5)
        _over_layers(axes, layers, title)
    present = [matrix for matrix in MATRICES if select(measured, matrix=matrix)]
    handles = [Line2D([], [], color=MATRIX_COLOURS[m], marker=".", label=MATRIX_LABELS[m]) for m in present]
    handles.append(Line2D([], [], color="#999999", linestyle="--", label="largest possible rank"))
    _legend(figure, handles + _mechanism_handles(layers, "s"))
    return figure


def spectrum_figure(measured: Sequence[Measured]) -> Figure:
    """Singular values relative to the largest, mean over images and heads, of twelve evenly chosen layers at most."""
    layers = _evenly(layers_of(measured), MOST_LAYERS)
    figure, panels = panel_grid(len(layers), 3, 2.3, sharey=True)
    for axes, layer in zip(panels, layers, strict=True):
        for matrix in MATRICES:
            for entry in select(measured, matrix=matrix):
                if entry.layer == layer:
                    values = entry.mean(SPECTRUM).numpy()
                    axes.plot(range(1, len(values) + 1), values, color=MATRIX_COLOURS[matrix], linewidth=1.2)
        for tolerance in filter(None, TOLERANCES.values()):
            axes.axhline(tolerance, color="#999999", linestyle=":", linewidth=0.8)
        axes.set(yscale="log", ylim=(1e-8, 2), xlabel="singular value")
        plain_ticks(axes.yaxis)
        axes.set_title(_title(layer), fontsize=SMALL)
    figure.supylabel("relative to the largest", fontsize=SMALL)
    present = [matrix for matrix in MATRICES if select(measured, matrix=matrix)]
    handles = [Line2D([], [], color=MATRIX_COLOURS[m], label=MATRIX_LABELS[m]) for m in present]
    _legend(figure, [*handles, Line2D([], [], color="#999999", linestyle=":", label="10⁻² and 10⁻³")])
    return figure


def score_map_figure(
    images: Sequence[Tensor],
    maps: Sequence[Sequence[Map]],
    point: tuple[float, float],
    names: Sequence[str] | None = None,
) -> Figure:
    """A row for each image: the image with the query, then the query's scores in at most four layers, evenly chosen.

    Args:
        images: (height, width, 3) or (height, width) in 0..1, as the network reads them.
        maps: from `score_maps` of the same images and point.
        point: (height, width) in 0..1 of the image.
        names: of the rows, "query" by default. A named row is a network, and its maps name its mechanisms only if it
            has several.
    """
    shown = [_evenly(row, MOST_MAPS) for row in maps]
    columns = 1 + max(len(row) for row in shown)
    height, width = images[0].shape[:2]
    side = WIDTH / (1 + MOST_MAPS)
    figure = Figure(figsize=(side * columns, (side * height / width + 0.4) * len(images)), layout="constrained")
    grid = figure.subplots(len(images), columns, squeeze=False)
    for row, image, chosen, name in zip(grid, images, shown, names or ["query"] * len(images), strict=True):
        row[0].imshow(image, cmap="gray", vmin=0, vmax=1)
        row[0].plot(point[1] * width - 0.5, point[0] * height - 0.5, "o", color="white", markeredgecolor="black")
        row[0].set_title(literal(name), fontsize=SMALL)
        with_mechanism = names is None or len({score_map.layer.mechanism for score_map in chosen}) > 1
        for axes, score_map in zip(row[1:], chosen, strict=False):
            _draw_map(axes, image, score_map, _title(score_map.layer, with_mechanism))
        for axes in row:
            axes.axis("off")
    return figure


def score_measure_figure(measured: Sequence[Measured]) -> Figure:
    """Entropy, negative scores and row sums of every layer, in its mechanism's colour; hollow: without rotation."""
    layers = layers_of(measured)
    figure, panels = panel_grid(len(SCORE_TITLES), 2, 2.5)
    for axes, (measure, title) in zip(panels, SCORE_TITLES.items(), strict=True):
        for entry in measured:
            bare = entry.condition["rotation"] == "off"
            place = 1 + layers.index(entry.layer) + (0.18 if bare else -0.18 if entry.layer.rotated else 0)
            factor = 100 if measure in PERCENT else 1
            mean, deviation = (factor * x.item() for x in (entry.mean(measure), entry.deviation(measure)))
            colour = colour_of(entry.layer.mechanism)
            fill = "white" if bare else colour
            axes.errorbar(
                place, mean, deviation, color=colour, marker="o", markerfacecolor=fill, markersize=5, linewidth=1
            )
        low, high = axes.get_ylim()
        high = max(high, 5 if measure in PERCENT else 0.1)
        axes.set_ylim(min(-0.03 * high, low if low < -0.1 else 0), 1.04 * high)
        _over_layers(axes, layers, title)
    handles = _mechanism_handles(layers, "o")
    if any(layer.rotated for layer in layers):
        handles.append(
            Line2D([], [], color="black", marker="o", markerfacecolor="white", linestyle="", label="without rotation")
        )
    _legend(figure, handles)
    return figure


def readout_figure(measured: Sequence[Measured]) -> Figure:
    """One layer's queries and keys under four mechanisms: sorted scores, then their measures, as the queries grow.

    measured: from `compare_readouts`.
    """
    figure, panels = panel_grid(2 * len(READOUTS), 2, 2.2)
    top, bottom = panels[: len(READOUTS)], panels[len(READOUTS) :]
    keys = measured[0].values[SORTED].shape[-1]
    for axes, name in zip(top, READOUTS, strict=True):
        for factor, shade in zip(SHOWN_FACTORS, SHADES, strict=True):
            for entry in select(measured, readout=name, factor=factor):
                axes.plot(range(1, keys + 1), keys * entry.mean(SORTED).numpy(), color=shade, label=f"a = {factor:g}")
        axes.axhline(0, color="#999999", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=1)
        axes.set(xscale="log", xlabel="key, from the best")
        plain_ticks(axes.xaxis)
        plain_ticks(axes.yaxis)
        axes.set_title(name, color=colour_of(name), fontsize=SMALL)
    limits = [axes.get_ylim() for axes in top[:3]]  # the fourth is larger by orders of magnitude
    for axes in top[:3]:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for axes in top[::2]:
        axes.set_ylabel("mean score × N")
    top[0].legend(frameon=False, fontsize=SMALL, ncols=2)
    _against_magnitude(bottom, [(select(measured, readout=name), colour_of(name), 1.0, name) for name in READOUTS])
    _legend(figure, bottom[0].get_lines())
    return figure


def magnitude_figure(measured: Sequence[Measured]) -> Figure:
    """Every layer with its own mechanism as its queries grow: a line for each layer, paler for earlier ones.

    measured: from `measure_magnitude`.
    """
    layers = layers_of(measured)
    figure, panels = panel_grid(len(MAGNITUDE_TITLES), 2, 2.5)
    _against_magnitude(panels, _by_layer(measured, [colour_of(layer.mechanism) for layer in layers]))
    _legend(figure, _mechanism_handles(layers, ""))
    return figure


def magnitude_comparison(networks: Mapping[str, Sequence[Measured]]) -> Figure:
    """The same for several networks, each in a colour of its own.

    networks: name → measurements from `measure_magnitude`.
    """
    colours = figures.colours_of(list(networks))
    figure, panels = panel_grid(len(MAGNITUDE_TITLES), 2, 2.5)
    lines: list[_Curve] = []
    for name, measured in networks.items():
        lines += _by_layer(measured, [colours[name]] * len(layers_of(measured)))
    _against_magnitude(panels, lines)
    _legend(figure, [Line2D([], [], color=colour, label=literal(name)) for name, colour in colours.items()])
    return figure


def _by_layer(measured: Sequence[Measured], colours: Sequence[str]) -> list[_Curve]:
    return [
        ([entry for entry in measured if entry.layer == layer], colour, 0.25 + 0.75 * number / len(colours), None)
        for number, (layer, colour) in enumerate(zip(layers_of(measured), colours, strict=True), start=1)
    ]


def comparison_figure(
    networks: Mapping[str, Sequence[Measured]], panels: Sequence[tuple[str, Mapping[str, object], str]]
) -> Figure:
    """The same measures of several networks: a row per network with a dot per layer, the first on top.

    Dots are means over images and heads, bars one standard deviation, in the colour of the network's name.

    Args:
        networks: name → measurements of one kind.
        panels: measure, condition and title of each panel; a network without such a measurement has no dots there.
    """
    deepest = max(len(layers_of(measured)) for measured in networks.values())
    height = 0.9 + len(networks) * max(0.26, 0.1 * deepest)
    figure, grid = panel_grid(len(panels), 3, height, sharey=True)
    for axes, (measure, condition, title) in zip(grid, panels, strict=True):
        for row, (name, measured) in enumerate(networks.items()):
            layers, entries = layers_of(measured), select(measured, **condition)
            # the layers from top to bottom of the row
            y = [row + 0.7 * ((layers.index(entry.layer) + 0.5) / len(layers) - 0.5) for entry in entries]
            mean, deviation = _statistics(entries, measure)
            axes.plot(mean, y, color=colour_of(name), marker="o", markersize=3.5, linewidth=0.8)
            axes.hlines(y, mean - deviation, mean + deviation, color=colour_of(name), alpha=0.35, linewidth=2)
        axes.set_title(title, fontsize=SMALL)
        axes.set_yticks(range(len(networks)), [literal(name) for name in networks])
        axes.set_ylim(len(networks) - 0.4, -0.6)
        axes.grid(visible=False, axis="y")
        for edge in range(1, len(networks)):
            axes.axhline(edge - 0.5, color="#DDDDDD", linewidth=0.8)
    return figure


def layers_of(measured: Sequence[Measured]) -> list[Layer]:
    """The measured layers in order, each once."""
    return list(dict.fromkeys(entry.layer for entry in measured))


def _statistics(entries: Sequence[Measured], measure: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and standard deviation of each entry."""
    means = np.array([entry.mean(measure).item() for entry in entries])
    return means, np.array([entry.deviation(measure).item() for entry in entries])


def _factor(entry: Measured) -> float:
    return float(str(entry.condition["factor"]))


def _against_magnitude(panels: Sequence[Axes], lines: Sequence[_Curve]) -> None:
    factors = [_factor(entry) for entries, *_ in lines for entry in entries]
    for axes, (measure, title) in zip(panels, MAGNITUDE_TITLES.items(), strict=True):
        for entries, colour, alpha, label in lines:
            x = [_factor(entry) for entry in entries]
            y = [_at_magnitude(entry, measure) for entry in entries]
            axes.plot(x, y, color=colour, alpha=alpha, marker=".", label=label)
        axes.set_title(title, fontsize=SMALL)
        axes.set_xscale("log", base=2)
        axes.set_xlim(min(factors) / 1.2, max(factors) * 1.2)  # a panel may have no number
        plain_ticks(axes.xaxis)
        axes.set_xlabel("a, the query's magnitude")
    entropy, negative, _, ratio = panels
    entropy.set_ylim(min(0.95, entropy.get_ylim()[0]), 1.005)
    negative.set_ylim(-1, max(5, negative.get_ylim()[1]))
    ratio.set(yscale="log", ylim=(0.9, min(HIGHEST_RATIO, max(10, ratio.get_ylim()[1]))))
    plain_ticks(ratio.yaxis)


def _at_magnitude(entry: Measured, measure: str) -> float:
    if measure == LOG_RATIO:
        return float(np.exp(min(entry.values[LOG_RATIO].double().nanmean().item(), 700)))
    return (100 if measure in PERCENT else 1) * entry.mean(measure).item()


def _draw_map(axes: Axes, image: Tensor, score_map: Map, title: str) -> None:
    """The image in grey, coloured where the scores are large."""
    grey = image.mean(-1) if image.dim() == 3 else image
    height, width = grey.shape
    where = (0, width, height, 0)
    largest = max(score_map.scores.abs().max().item(), 1e-12)
    axes.imshow(0.5 + 0.5 * grey, cmap="gray", vmin=0, vmax=1, extent=where)
    axes.imshow(
        score_map.scores,
        cmap="RdBu_r",
        norm=TwoSlopeNorm(0, -largest, largest),
        alpha=(0.15 + 0.7 * score_map.scores.abs() / largest).numpy(),
        extent=where,
        interpolation="nearest",
    )
    rows, columns = score_map.layer.grid
    x, y = (score_map.token[1] + 0.5) * width / columns, (score_map.token[0] + 0.5) * height / rows
    axes.plot(x, y, "o", color="white", markeredgecolor="black", markersize=4)
    axes.set_title(title, fontsize=SMALL)


def _over_layers(axes: Axes, layers: Sequence[Layer], title: str) -> None:
    axes.set_title(title, fontsize=SMALL)
    axes.set_xlabel("attention layer")
    axes.set_xlim(0.5, len(layers) + 0.5)
    integer_ticks(axes.xaxis)


def _mechanism_handles(layers: Sequence[Layer], marker: str) -> list[Line2D]:
    names = dict.fromkeys(layer.mechanism for layer in layers)
    return [
        Line2D([], [], color=colour_of(name), marker=marker, linestyle="" if marker else "-", label=name)
        for name in names
    ]


def _legend(figure: Figure, handles: list[Line2D]) -> None:
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False, fontsize=SMALL
    )


def _evenly(items: Sequence[Item], most: int) -> list[Item]:
    return [items[place] for place in evenly(len(items), most).tolist()]


def _title(layer: Layer, with_mechanism: bool = True) -> str:
    """Name, mechanism and grid of tokens, on two lines."""
    mechanism = f"{layer.mechanism}, " if with_mechanism else ""
    return f"{literal(layer.name.removesuffix('.attn'))}\n{mechanism}{layer.grid[0]}×{layer.grid[1]}"
