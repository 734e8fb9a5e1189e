"""What the page of evidence on linearizing says about the text recognizer: tables of the ledger, time against width."""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from evidence.text_recognizer import HEIGHT, STRIDE, Reader, linearized, load_recognizer
from evidence.text_recognizer import WIDTH as CHANNELS
from linvit import environment
from linvit.analysis.figures import SMALL, WIDTH, colour_of, subplots, svg
from linvit.analysis.markdown import check_marks, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import short_commit
from linvit.bench.clock import Timing, clock_for, interleave
from linvit.files import write_text

Results = Mapping[str, Mapping[str, Any]]

NAMES = {"copied": "not aligned", "align": "aligned", "distill": "and distilled", "whole": "distilled"}
WIDTHS, ROUNDS, MIDDLE = (320, 640, 1280, 2560, 5120, 8192), 15, (3, 11)
"""Pixels; rounds; and the places among the sorted rounds between which the median is with 96 %, whatever its law."""
TIMED = ("softmax", "linear", "rala", "mala")


def write_results(page: Path, ledger: Path) -> None:
    """Puts the table of the ledger and its figure between the marks `ocr` of a page."""
    lines = [json.loads(line) for line in ledger.read_text(encoding="utf-8").splitlines()]
    trained = {line["run"]: line["result"] for line in lines if line["run"] != "teacher"}
    equal = next(line["result"]["measures"] for line in lines if line["run"] == "teacher")
    teacher = next(iter(trained.values()))["measures"]
    commits = sorted({short_commit(line["commit"] or "unknown") for line in lines})
    machines = sorted({", ".join(line["machine"]) for line in lines})
    about = (
        f"The teacher reads {100 * teacher['teacher']:.2f} % of the lines exactly,"
        f" {100 * teacher['joined_teacher']:.2f} % without spaces. In brackets: 95 % intervals over books. One seed;"
        f" float32; CPU minutes of one thread without the trials of the rates; {'; '.join(machines)};"
        f" torch {lines[0]['torch']}, commits {', '.join(commits)}."
    )
    equality = (
        "Largest difference of a probability between our network and its file (median and maximum over lines): in"
        f" float64 {_pair(equal['exact'])} on {equal['exact_lines']} lines; in float32, with onnxruntime for the file,"
        f" {_pair(equal['ours'])} on {equal['lines']} lines. {equal['same']} of these lines are read the same."
        f" onnxruntime differs from itself, if it does not optimize the graph, by {_pair(equal['theirs'])}."
    )
    table = markdown_rows([*_rows(trained)], left=3)
    write_text(page.parent / "ocr.svg", svg(_curves(trained)))
    picture = "![Exact lines of the development set over the lines read](ocr.svg)"
    replace_between_marks(page, f"{table}\n\n*{about}*\n\n{picture}\n\n{equality}\n", *marks("ocr"))


def _rows(trained: Results) -> Iterator[dict[str, str]]:
    order = [*NAMES]
    for student in dict.fromkeys(run.split()[0] for run in trained):
        stages = {stage: trained[f"{student} {stage}"] for stage in order if f"{student} {stage}" in trained}
        lines, seconds = 0, 0.0
        for stage, result in stages.items():
            lines, seconds = lines + result["lines"], seconds + result["seconds"]
            of = {key: 100 * value for key, value in result["measures"].items()}
            yield {
                "student": f"`{student}`",
                "blocks": result["pattern"],
                "stage": NAMES[stage],
                "lines read": f"{lines:,}",
                "minutes": f"{seconds / 60:.1f}",
                "exact, %": f"{of['exact']:.2f}",
                "lost, points": _interval(of, ""),
                "lost without spaces": _interval(of, "joined_"),
                "same as the teacher, %": f"{of['same']:.1f}",
            }


def _pair(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.1e}" for value in values)


def _interval(of: Mapping[str, float], prefix: str) -> str:
    return f"{of[f'{prefix}lost']:.2f} [{of[f'{prefix}low']:.2f}, {of[f'{prefix}high']:.2f}]"


def _curves(trained: Results) -> Figure:
    """Exact lines for development over the lines read while they are distilled."""
    figure, axes = subplots((WIDTH, 3.2))
    for run, result in trained.items():
        student, stage = run.split()
        if stage in ("distill", "whole"):
            aligned = trained[f"{student} align"]["lines"] if stage == "distill" else 0
            share = result["lines"] / result["curve"][-1][0]
            points = [(aligned + share * step, 100 * exact) for step, _, exact, _ in result["curve"]]
            dashes = "-" if stage == "distill" else "--" if student.endswith("not_aligned") else ":"
            style = {"color": colour_of(student), "linestyle": dashes, "marker": "s" if "local" in student else "."}
            axes.plot(*zip(*points, strict=True), label=student.replace("_", " "), **style)
    axes.set(xlabel="lines read", ylabel="exact lines, %")
    axes.legend(frameon=False, fontsize=SMALL, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def write_times(model: Path, page: Path) -> None:
    """Measures one line by width, and puts the table between the marks `ocr_times` of a page.

    Weights decide no time, so the students are not trained. All networks take turns, and so do the attentions alone.
    """
    check_marks(page, *marks("ocr_times"))
    recognizer, _ = load_recognizer(model)
    students = {name: copy.deepcopy(recognizer) for name in TIMED}
    for name in TIMED[1:]:
        students[name].reader = linearized(recognizer.reader, name)
    rows = []
    for width in WIDTHS:
        image, tokens = torch.randn(1, 3, HEIGHT, width), torch.randn(1, width // STRIDE, CHANNELS)
        whole = {name: partial(student, image) for name, student in students.items()}
        alone = {name: partial(_attend, student.reader, tokens) for name, student in students.items()}
        row = {"pixels": f"{width:,}"}
        for title, calls in (("", whole), (", attentions", alone)):
            timings: dict[str, Timing] = {}
            with torch.inference_mode():
                interleave(calls, clock_for("cpu", 1), ROUNDS, timings)
            base = timings.pop("softmax")
            row[f"softmax{title}, ms"] = f"{base.median_ms:.2f}"
            row |= {f"{name}{title}, ×": _ratio(base, timing) for name, timing in timings.items()}
        rows.append(row)
    machine = environment.describe(1, 1)
    about = (
        "×: times as fast as softmax attention (PyTorch's scaled_dot_product_attention); float32, one thread, CPU time,"
        f" median of {ROUNDS} rounds, with its 96 % interval; {', '.join(machine['devices'])};"
        f" commit {short_commit(machine['commit'] or 'unknown')}."
    )
    replace_between_marks(page, f"{markdown_rows(rows, left=0)}\n\n*{about}*\n", *marks("ocr_times"))


def _attend(reader: Reader, tokens: Tensor) -> list[Tensor]:
    return [block.attn(tokens) for block in reader.blocks]


def _ratio(base: Timing, timing: Timing) -> str:
    ratios = sorted(other / seconds for seconds, other in zip(timing.seconds, base.seconds, strict=True))
    low, high = (ratios[place] for place in MIDDLE)
    return f"{median(ratios):.2f} [{low:.2f}, {high:.2f}]"
