"""The results of a benchmark as a table, as sentences, as figures and as a page."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator
from matplotlib.transforms import Bbox

from linvit.analysis.figures import colour_of, colours_of, literal, plain_ticks, subplots, write_figure
from linvit.analysis.markdown import markdown_rows
from linvit.analysis.report import bullets, figure_image, paragraph, table, write_page
from linvit.bench import machine
from linvit.bench.rows import Report, Row, curves, measured
from linvit.files import write_json
from linvit.models.published import PUBLISHED

CLOCKS = {"cpu": "CPU time", "wall": "wall time", "gpu": "GPU time"}
MISSING = "–"

Cell = Callable[[Row], str]


def number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def formatted(value: float | None, form: str = ".2f") -> str:
    return MISSING if value is None else format(value, form)


def against(rival: str) -> Cell:
    return lambda row: formatted(row.against.get(rival))


def has_published_accuracy(row: Row) -> bool:
    """Whether the network has a published accuracy, and the row is of that: floating-point numbers, at 224 px."""
    return row.name in PUBLISHED and row.size == (224, 224) and "int8" not in row.variant


def _top1(row: Row) -> str:
    return f"{PUBLISHED[row.name].top1:g}" if has_published_accuracy(row) else MISSING


VARIANT: dict[str, Cell] = {"variant": lambda row: row.variant, "dtype": lambda row: row.dtype}
TOKENS: dict[str, Cell] = {"tokens": lambda row: f"{row.tokens:,}"}
SIZE: dict[str, Cell] = {"px": lambda row: f"{row.size[0]} × {row.size[1]}" if row.size else MISSING}
BATCH: dict[str, Cell] = {"batch": lambda row: str(row.batch)}
TIME: dict[str, Cell] = {"ms": lambda row: number(row.median_ms), "± IQR": lambda row: number(row.spread_ms)}
RATIOS: dict[str, Cell] = {"× plain": lambda row: formatted(row.ratio), "× reference": against("reference")}
ERROR: dict[str, Cell] = {"error": lambda row: formatted(row.error, ".0e")}
PEAK: dict[str, Cell] = {"peak MiB": lambda row: number(row.peak_mib)}
NETWORK: dict[str, Cell] = {"network": lambda row: row.name, "pattern": lambda row: row.pattern or MISSING}

OF_NETWORKS = {**NETWORK, **SIZE, **VARIANT, **BATCH, **TIME, **RATIOS, **ERROR, **PEAK}
COLUMNS: dict[str, dict[str, Cell]] = {
    "op": {
        "operator": lambda row: row.name,
        **VARIANT, **TOKENS, **BATCH, **TIME, **RATIOS, "× sdpa": against("sdpa"), **ERROR, **PEAK,
    },
    "model": {**OF_NETWORKS, "file MiB": lambda row: number(row.file_mib), "published top-1, %": _top1},
    "train": OF_NETWORKS,
}  # fmt: skip
WORDS = {"operator", "network", "mechanism", "pattern", "px", "variant", "dtype", "inputs"}


def cells(report: Report) -> list[dict[str, str]]:
    """The cells of the table, by heading, without columns in which nothing was measured."""
    rows = [{heading: cell(row) for heading, cell in COLUMNS[report.kind].items()} for row in report.rows]
    filled = {heading for row in rows for heading, cell in row.items() if cell != MISSING}
    return [{heading: cell for heading, cell in row.items() if heading in filled} for row in rows]


def words(table: Sequence[Mapping[str, str]]) -> int:
    """How many of the first columns of a table contain words."""
    return sum(heading in WORDS for row in table[:1] for heading in row)


def to_markdown(report: Report) -> str:
    """Machine, table and sentences."""
    rows = cells(report)
    text = markdown_rows(rows, left=words(rows)) if rows else ""
    sections = [f"{machine.sentence(report.machine)}.", text, "\n".join(f"- {line}" for line in sentences(report))]
    return "\n\n".join(filter(None, sections))


def sentences(report: Report) -> Iterator[str]:
    """Sentences on skipped rows, the table's columns, growth, crossovers, and whether loss curves agree."""
    for row in report.rows:
        if row.skipped is not None:
            extent = f" at {row.tokens:,} tokens" if row.tokens is not None else ""
            yield f"{row.name} {row.variant} {row.dtype}{extent}: {row.skipped}"
    clocks = {row.clock for row in measured(report.rows)}
    for clock in sorted(filter(None, clocks)):
        yield f"ms: median over the rounds of {CLOCKS[clock]} per call; IQR: interquartile range; ×: times as fast as."
    extent = "tokens" if any(row.tokens is not None for row in report.rows) else "pixels"
    for name, value in report.findings.get("growth", {}).items():
        yield f"{name} grows with {extent}^{value:.2f}"
    for name, value in report.findings.get("memory_growth", {}).items():
        yield f"{name}: memory grows with {extent}^{value:.2f}"
    for name, value in report.findings.get("crossover", {}).items():
        rival = "" if " against " in name else " against sdpa"
        yield f"{name}{rival}: faster {'at every size' if value == 0 else f'from about {value:,.0f} {extent} on'}"
    for name, variants in report.findings.get("curves", {}).items():
        for variant, curve in variants.items():
            agreement = "agrees" if curve["agrees"] else "DOES NOT AGREE"
            yield (
                f"loss curve of {name} {variant}: {agreement} with plain, at most {curve['deviation']:.1e} off in "
                f"{len(curve['losses'])} steps (noise of its dtype: {curve['noise']:.1e})"
            )


LINES = ("-", "--", ":", "-.")
FONT = 10
DASHES: dict[str, Any] = {"handlelength": 4.0}  # a shorter sample of a dashed line looks solid
MECHANISM_OF = {"ravlt": "rala", "mavit": "mala", "care": "linear"}
OF_PEERS = ("#7F3C8D", "#555555", "#B8860B", "#8C564B", "#3A9BD9", "#6B7300", "#CC79A7", "#A50F15", "#1F2E8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
DISTANCES = (7, 14, 22, 32, 44, 58, 74)  # points, from a name to its point; all but the first have a line between
MARKER = 5  # points: half of its side

Name = tuple[str, str, Sequence[tuple[float, float]]]
"""A network's words, its colour and its points, all at one height, in the units of the axes."""


def figures(report: Report) -> Iterator[tuple[str, Figure]]:
    """Name and figure of everything that the report has numbers for."""
    if any(len(line) > 1 for line in curves(report.rows).values()):
        yield "growth", growth(report)
    if report.kind == "model":
        for batch in sorted({row.batch for row in measured(report.rows)}):
            rows = [row for row in measured(report.rows) if row.batch == batch and has_published_accuracy(row)]
            if rows:
                yield f"accuracy_batch{batch}", accuracy(rows)
    for name, variants in report.findings.get("curves", {}).items():
        yield f"loss_{name}", losses(name, variants)


def growth(report: Report) -> Figure:
    """Time, and memory if it was measured, over tokens or pixels, all axes logarithmic."""
    rows, exponents = report.rows, report.findings.get("growth", {})
    lines = {name: line for name, line in curves(rows).items() if len(line) > 1}
    names = list(dict.fromkeys(line[0].name for line in lines.values()))
    colours = colours_of(names)
    variants = list(dict.fromkeys((line[0].variant, line[0].dtype, line[0].batch) for line in lines.values()))
    with_memory = any(row.peak_mib for line in lines.values() for row in line)
    size = 6.2 * (1 + with_memory), 4.6 + 0.13 * len(lines)
    figure, (panels,) = subplots(size, 1, 1 + with_memory, squeeze=False)
    work = {name.partition(", ")[2] for name in lines}
    common = f", {work.pop()}" if len(work) == 1 and "" not in work else ""
    for name, line in lines.items():
        style = {
            "color": colours[line[0].name],
            "linestyle": LINES[variants.index((line[0].variant, line[0].dtype, line[0].batch)) % len(LINES)],
            "marker": MARKERS[names.index(line[0].name) % len(MARKERS)],
            "markersize": 4,
        }
        power = f": power {exponents[name]:.2f}" if name in exponents else ""
        label = f"{name.removesuffix(common)}{power}"
        panels[0].plot([row.extent for row in line], [row.median_ms for row in line], label=label, **style)
        known = [row for row in line if row.peak_mib]
        if with_memory and known:
            panels[1].plot([row.extent for row in known], [row.peak_mib for row in known], **style)
    what = "tokens" if rows[0].tokens is not None else "pixels"
    memory = "memory of the cache" if rows[0].work == "token" else "peak memory above inputs and weights"
    labels = (f"ms per call{common}", f"{memory}, MiB")
    marked = sorted({row.extent for line in lines.values() for row in line})
    for axes, label in zip(panels, labels, strict=False):
        axes.set(xlabel=what, ylabel=label, xscale="log", yscale="log")
        axes.set_xticks(marked, [_short(extent) for extent in marked], fontsize=FONT, minor=False)
        axes.minorticks_off()
    columns = 1 if len(lines) < 8 else 2
    figure.legend(frameon=False, fontsize=FONT, loc="outside lower center", ncols=columns * len(panels), **DASHES)
    return figure


def _short(extent: int) -> str:
    if extent < 100_000:
        return f"{extent:,}"
    return f"{extent / 1e6:.0f}M" if extent >= 10_000_000 else f"{extent / 1e6:.2g}M"


def accuracy(rows: Sequence[Row]) -> Figure:
    """Published accuracy over measured time, one colour per family, one marker per variant, lines between variants."""
    figure, axes = subplots((6.4, 4.8))  # narrow, so that its words can still be read on a phone
    names = list(dict.fromkeys(row.name for row in rows))
    variants = list(dict.fromkeys((row.variant, row.dtype) for row in rows))
    colours = family_colours(names)
    labels: list[Name] = []
    for name in names:
        points = [row for row in rows if row.name == name]
        places = [(row.median_ms or 0.0, PUBLISHED[name].top1) for row in points]
        axes.plot(*zip(*places, strict=True), color=colours[name], alpha=0.5, linewidth=1)
        for row, place in zip(points, places, strict=True):
            marker = MARKERS[variants.index((row.variant, row.dtype))]
            face = "white" if row.pattern is None else colours[name]
            axes.plot(*place, marker, markerfacecolor=face, color=colours[name], markersize=7)
        words = f"{name} ({points[0].pattern})" if points[0].pattern else name
        labels.append((words, colours[name], places))
    for marker, (variant, dtype) in zip(MARKERS, variants, strict=False):
        axes.plot([], [], marker, color="#555555", markerfacecolor="white", label=f"{variant} {dtype}")
    size, batch, threads = rows[0].size or (0, 0), rows[0].batch, rows[0].threads
    clock = rows[0].clock or "cpu"
    heading = f"{CLOCKS[clock]}, {size[0]} × {size[1]} px, batch {batch}"
    if clock != "gpu":
        heading += f", {threads} thread{'s' * (threads > 1)}"
    axes.set(xlabel=f"ms per batch ({heading})", ylabel="published ImageNet-1k top-1, %", xscale="log")
    axes.margins(0.12, 0.1)  # room for the names
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    plain_ticks(axes.xaxis)
    columns = 2 if len(variants) == 4 else min(3, len(variants))
    figure.legend(frameon=False, fontsize=FONT, loc="outside lower center", ncols=columns, title="filled: ours")
    add_names(figure, axes, labels)
    return figure


def add_names(figure: Figure, axes: Axes, names: Sequence[Name]) -> list[Annotation]:
    """Writes each name at the nearest place beside one of its points where it covers nothing.

    Limits, legend and words of the axes must be final. Where no place is free, a name covers as few things as possible.
    """
    figure.draw_without_rendering()
    unit, texts = figure.dpi / 72, []
    in_pixels = [axes.transData.transform(points) for _, _, points in names]
    taken = [Bbox([point, point]).padded(MARKER * unit) for points in in_pixels for point in points]
    taken += [Bbox([points.min(0), points.max(0)]).padded(unit) for points in in_pixels]
    for (words, colour, points), pixels in zip(names, in_pixels, strict=True):
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": FONT, "color": colour, "va": "bottom"}
        text = axes.annotate(literal(words), points[0], (0, 0), **style)
        size = np.array(text.get_window_extent().size)
        text.remove()
        least, nearest = math.inf, (0, 0, Bbox.null())
        for distance, number, side in itertools.product(DISTANCES, range(len(points)), SIDES):
            low = pixels[number] + np.array(side) * distance * unit - size * (1 - np.array(side)) / 2
            box = Bbox([low, low + size])
            outside = not all(axes.bbox.contains(*corner) for corner in box.corners())
            covered = box.count_overlaps(taken) + outside
            if covered < least:
                least, nearest = covered, (distance, number, box)
        distance, number, box = nearest
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkB": 4} if distance > DISTANCES[0] else None
        shift = (box.min - pixels[number]) / unit
        text = axes.annotate(literal(words), points[number], tuple(shift), arrowprops=line, **style)
        text.set_in_layout(False)  # it takes no space from the axes
        taken.append(box.padded(unit))
        texts.append(text)
    return texts


def family_colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per family, the first word of a name; ours have that of their mechanism."""
    families = [name.partition("_")[0] for name in names]
    ours = {family: colour_of(MECHANISM_OF[family]) for family in families if family in MECHANISM_OF}
    others = [family for family in dict.fromkeys(families) if family not in ours]
    colours = ours | dict(zip(others, itertools.cycle(OF_PEERS), strict=False))
    return {name: colours[family] for name, family in zip(names, families, strict=True)}


def losses(name: str, variants: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Loss over steps, and each variant's distance from the plain curve next to the noise of its dtype."""
    figure, (left, right) = subplots((11, 4), 1, 2)
    plain = variants["plain"]["losses"] if "plain" in variants else next(iter(variants.values()))["losses"]
    noises: dict[float, str] = {}
    colours = colours_of(list(variants))
    for index, (variant, curve) in enumerate(variants.items()):
        style = {"color": colours[variant], "label": variant, "linestyle": LINES[index % len(LINES)]}
        steps = range(1, 1 + len(curve["losses"]))
        left.plot(steps, curve["losses"], **style)
        off = [abs(loss - other) for loss, other in zip(curve["losses"], plain, strict=True)]
        if any(off):
            right.plot(steps, [value or float("nan") for value in off], **style)
        noises.setdefault(curve["noise"], "bfloat16" if "bf16" in variant else "float32")
    for noise, dtype in noises.items():
        right.axhline(noise, color="#BBBBBB", linewidth=1)
        right.annotate(
            f"noise of {dtype}", (1, noise), (0, 3), textcoords="offset points", fontsize=FONT, color="#777777"
        )
    left.set(xlabel="step", ylabel="loss", title=name)
    right.set(xlabel="step", ylabel="distance from the plain curve", yscale="log")
    left.legend(frameon=False, fontsize=FONT, **DASHES)
    return figure


def save(report: Report, folder: Path) -> None:
    """Writes bench.json, report.html and the figures, each whole or not at all."""
    write_json(folder / "bench.json", report.as_dict(), indent=1)
    about = paragraph(f"{machine.sentence(report.machine)}.")
    sections = [("Results", [about, table(cells(report)), bullets(sentences(report))])]
    for name, figure in figures(report):
        words = name.replace("_", " ").capitalize()
        sections.append((words, [figure_image(figure, words)]))
        write_figure(figure, folder / name)
    write_page(folder / "report.html", f"linvit bench {report.kind}", sections)
