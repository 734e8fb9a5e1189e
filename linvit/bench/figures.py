"""Figures of what was measured (accuracy over latency, time and memory over size, loss curves), and its HTML page."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from linvit.analysis.figures import colour_of, colours_of, plain_ticks, subplots
from linvit.analysis.labels import Label, add_labels
from linvit.analysis.report import bullets, figure_image, paragraph, table, write_page
from linvit.bench import machine
from linvit.bench.page import CLOCKS, cells, has_published_accuracy, sentences
from linvit.bench.rows import Report, Row, curves, measured
from linvit.models.published import PUBLISHED

LINES = ("-", "--", ":", "-.")
FONT = 10
DASHES: dict[str, Any] = {"handlelength": 4.0}  # a shorter sample of a dashed line looks solid
MECHANISM_OF = {"ravlt": "rala", "mavit": "mala", "care": "linear"}
OF_PEERS = ("#7F3C8D", "#555555", "#B8860B", "#8C564B", "#3A9BD9", "#6B7300", "#CC79A7", "#A50F15", "#1F2E8C")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


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
    labels = []
    for name in names:
        points = [row for row in rows if row.name == name]
        places = [(row.median_ms or 0.0, PUBLISHED[name].top1) for row in points]
        axes.plot(*zip(*places, strict=True), color=colours[name], alpha=0.5, linewidth=1)
        for row, place in zip(points, places, strict=True):
            marker = MARKERS[variants.index((row.variant, row.dtype))]
            face = "white" if row.pattern is None else colours[name]
            axes.plot(*place, marker, markerfacecolor=face, color=colours[name], markersize=7)
        words = f"{name} ({points[0].pattern})" if points[0].pattern else name
        labels.append(Label(words, colours[name], places))
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
    add_labels(figure, axes, labels, FONT)
    return figure


def family_colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per family, the first word of a name; ours have that of their mechanism."""
    families = [name.partition("_")[0] for name in names]
    ours = {family: colour_of(MECHANISM_OF[family]) for family in families if family in MECHANISM_OF}
    others = [family for family in dict.fromkeys(families) if family not in ours]
    colours = ours | dict(zip(others, cycle(OF_PEERS), strict=False))
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


def write_report(report: Report, figures: Mapping[str, Figure], path: Path) -> None:
    """Writes table, sentences and figures (by name) of a benchmark as a page."""
    about = paragraph(f"{machine.sentence(report.machine)}.")
    sections: list[tuple[str, Sequence[str]]] = [("Results", [about, table(cells(report)), bullets(sentences(report))])]
    for name, figure in figures.items():
        words = name.replace("_", " ").capitalize()
        sections.append((words, [figure_image(figure, words)]))
    write_page(path, f"linvit bench {report.kind}", sections)
