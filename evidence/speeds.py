"""Speeds on our pages: tables written from what was measured, read again for figures and for numbers elsewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import evidence.bench  # noqa: F401 - adds the figures of accuracy
from evidence.rows import EVIDENCE
from linvit.analysis.figures import svg
from linvit.analysis.markdown import check_marks, copy_figures, markdown_rows, replace_between_marks
from linvit.bench.page import CLOCKS, MISSING, figures, to_markdown
from linvit.bench.rows import Report, Row
from linvit.files import write_text

PART = re.compile(r"<!-- bench (\w+):begin -->")
USED = re.compile(r"cores, (\d+) used")
OPERATORS = ("rala", "mala")
NETWORKS = ("ravlt_tiny", "mavit_tiny", "care_s0")


def marks(name: str) -> tuple[str, str]:
    """The lines of a page that enclose the results of the folder with that name."""
    return f"<!-- bench {name}:begin -->", f"<!-- bench {name}:end -->"


def check_page(page: Path, folder: Path) -> None:
    """Raises ValueError if the page has no place for the results that the folder is named after."""
    check_marks(page, *marks(folder.name))


def write_page(page: Path, folder: Path) -> None:
    """Puts the results and figures of a folder between the marks of its name; figures are copied next to the page."""
    report = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    for row in report["rows"]:
        row["size"] = row["size"] and tuple(row["size"])
    prefix = f"bench_{folder.name}_"
    copied = copy_figures(folder, "*.svg", page, prefix)
    shown = [f"![{figure.stem.replace('_', ' ')}]({prefix}{figure.name})" for figure in copied]
    text = to_markdown(Report(**report | {"rows": [Row(**row) for row in report["rows"]]}))
    replace_between_marks(page, "\n".join(["", "\n\n".join([text, *shown]), "", ""]), *marks(folder.name))


def section(text: str, bench: str) -> str:
    """What stands between the marks of a benchmark in the text of a page."""
    begin, end = marks(bench)
    return text.partition(begin)[2].partition(end)[0]


def rows_in(section: str) -> list[dict[str, str]]:
    """The rows of the table in a section, by their headings."""
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def bench_rows(page: str, bench: str) -> list[dict[str, str]]:
    """The rows of a benchmark's table on a page of evidence, by their headings."""
    return rows_in(section(_text(page), bench))


def _text(page: str) -> str:
    return (EVIDENCE / f"{page}.md").read_text(encoding="utf-8")


def redraw(page: Path) -> list[Path]:
    """Draws the figures of accuracy next to a page again, from the numbers in its tables; returns their files.

    Other figures need more than the tables have.
    """
    text, written = page.read_text(encoding="utf-8"), []
    for bench in PART.findall(text):
        for name, figure in figures(report_on_page(text, bench)):
            file = page.parent / f"bench_{bench}_{name}.svg"
            if name.startswith("accuracy") and f"({file.name})" in text:
                write_text(file, svg(figure))
                written.append(file)
    return written


def redraw_all() -> None:
    """Draws those of every page."""
    for page in sorted(EVIDENCE.glob("*.md")):
        redraw(page)


def report_on_page(text: str, bench: str) -> Report:
    """The networks with a time in the table of a benchmark, with no more than their figures of accuracy need."""
    words, rows = section(text, bench), []
    used = USED.search(words)
    clock = next((clock for clock, shown in CLOCKS.items() if f" of {shown} per call" in words), "cpu")
    for row in rows_in(words):
        if {"network", "pattern", "variant", "px", "ms"} <= row.keys():
            height, width = map(int, row["px"].split(" × "))
            measured = Row(row["network"], row["variant"], row["dtype"], int(row["batch"]), int(used[1]) if used else 1)
            measured.size, measured.clock = (height, width), clock
            measured.pattern = None if row["pattern"] == MISSING else row["pattern"]
            measured.median_ms = None if row["ms"] == MISSING else float(row["ms"])
            rows.append(measured)
    return Report("model", rows=rows)


def crossover(bench: str, variant: str, mechanism: str) -> str:
    """The tokens from which on a mechanism is faster than softmax attention, as the page says; at least the fewest."""
    start = rf"- {mechanism} {variant} \w+(?:, batch 8)? against sdpa: faster"
    words = rf"{start} (?:from about (?P<tokens>[\d,]+) tokens|at every size)"
    match = re.search(words, section(_text("benchmarks-operator"), bench))
    assert match, (bench, variant, mechanism)
    return match["tokens"] or bench_rows("benchmarks-operator", bench)[0]["tokens"]


def times_softmax(bench: str, variant: str, mechanism: str, tokens: str = "12,544") -> str:
    """How many times as fast as softmax attention, without digits that say little."""
    for row in bench_rows("benchmarks-operator", bench):
        if (row["operator"], row["variant"], row["tokens"]) == (mechanism, variant, tokens):
            times = float(row["× sdpa"])
            return f"{times:.0f}" if times >= 5 else f"{times:.1f}"
    raise KeyError(bench)


def network(bench: str, name: str, variant: str, column: str, page: str = "benchmarks-networks") -> float:
    """A cell of a table of networks, at the largest batch."""
    matching = [row for row in bench_rows(page, bench) if (row["network"], row["variant"]) == (name, variant)]
    return float(matching[-1][column])


def share(bench: str, ours: str, peer: str) -> str:
    """Our time, folded and with the kernel, over the peer's, folded."""
    return f"{network(bench, ours, 'fused+cpp', 'ms') / network(bench, peer, 'fused', 'ms'):.2f}"


def speeds() -> dict[str, dict[str, str]]:
    """Measure → processor → values: the numbers that README, the advice and the page of benchmarks repeat."""
    cpus = {"AMD EPYC": ("op", "model_batch8"), "Intel Xeon": ("op_own", "model_kept")}
    by_measure: dict[str, dict[str, str]] = {}

    def add(measure: str, processor: str, values: Iterator[str]) -> None:
        by_measure.setdefault(measure, {})[processor] = ", ".join(values)

    for processor, (op, batch8) in cpus.items():
        for variant, words in (("plain", "plain PyTorch"), ("cpp", "kernel")):
            add(
                f"faster than softmax attention from, tokens: {words}",
                processor,
                (crossover(op, variant, m) for m in OPERATORS),
            )
            add(
                f"× softmax attention at 12,544 tokens: {words}",
                processor,
                (times_softmax(op, variant, m) for m in OPERATORS),
            )
        for variant, words in (("plain", "as created"), ("fused+cpp", "folded, with the kernel")):
            ratios = (f"{network(batch8, name, variant, '× reference'):.2f}" for name in NETWORKS)
            add(f"× released order, eight images: {words}", processor, ratios)
        add(
            "`ravlt_tiny`: time over that of ConvNeXt-T",
            processor,
            iter([share(batch8, "ravlt_tiny", "convnext_tiny")]),
        )
        peers = ("efficientvit_b1", "mobilenetv4_conv_medium")
        add(
            "`care_s0`: time over those of EfficientViT-B1, MobileNetV4-M",
            processor,
            (share(batch8, "care_s0", peer) for peer in peers),
        )
    for variant, words in (("plain", "plain PyTorch"), ("triton", "kernel")):
        values = (crossover("gpu_softmax", variant, m) for m in OPERATORS)
        add(f"faster than softmax attention from, tokens: {words}", "H200, bfloat16", values)
        values = (times_softmax("gpu_softmax", variant, m) for m in OPERATORS)
        add(f"× softmax attention at 12,544 tokens: {words}", "H200, bfloat16", values)
    return by_measure


def table() -> str:
    """The speeds of both processors and the GPU side by side."""
    processors = ("AMD EPYC", "Intel Xeon", "H200, bfloat16")
    cells = [
        {"": measure, **{processor: values.get(processor, "–") for processor in processors}}
        for measure, values in speeds().items()
    ]
    return markdown_rows(cells, left=1)
