"""The study as Markdown: a table a group, the verdicts, and the place for both in a larger page."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linvit.files import replacing
from linvit.studies.claims import MARGIN, Judged
from linvit.studies.statistics import FAILS, HOLDS, UNCLEAR, Estimate

BEGIN, END = "<!-- study:begin -->", "<!-- study:end -->"

ABOUT = """A stand-in, not ImageNet: DeiT-shaped networks of {parameters} parameters, {data} at {height}×{width} px,
{train} images to train on and {held_out} held out in each of {seeds} seeds; the seed draws the split, the initial
weights and the order. {epochs} epochs, one recipe for all, accuracy after the last epoch; one thread a run, torch
{torch}, timm {timm}, commit {commit}."""
ABOUT_TABLE = """Mean over the seeds with its 95 % t-interval; Δ: paired difference in percentage points, with its own
95 % t-interval; p: paired t-test, corrected for the number of variants by Holm's procedure. MACs of one image:
convolutions and linear layers; the products inside the attention come on top."""
ABOUT_CLAIMS = """The rule was fixed before there were data. All comparisons below are one family. A claim that one
thing is better holds where the paired difference's interval, at the level that Holm's procedure gives it (5 % for the
family), lies above zero, and does not hold where it lies below. "Equal" holds where the interval (Bonferroni) lies
within ±{margin:g} point, and does not hold where it lies beyond. Everything else cannot be told at this size. A claim
of several comparisons holds with all of them and fails with one. Accuracies are in percentage points."""


def page(
    rows: Sequence[Any],
    judged: Sequence[Judged],
    about: Mapping[str, Any],
    baselines: Sequence[str],
    figure: str,
    inside: str,
) -> str:
    """The whole section, headings of third level; rows as `linvit.studies.study.compare` returns them.

    inside: Markdown on the trained networks, which stands before the claims.
    """
    parts = [_filled(about), f"![Accuracy of every variant]({figure})", _flat(ABOUT_TABLE)]
    for group in dict.fromkeys(row.group for row in rows):
        own = [_cells(row, baselines) for row in rows if row.group == group]
        table = markdown_table(list(own[0]), [list(cells.values()) for cells in own], left=1)
        parts += [f"### {group}", table, _stand_in(about)]
    if inside:
        parts += [inside, _stand_in(about)]
    counts = Counter(one.verdict for one in judged)
    total = ", ".join(f"{verdict} {counts[verdict]}" for verdict in (HOLDS, FAILS, UNCLEAR))
    claims = [[o.claim.statement, o.claim.source, "<br>".join(o.measured), o.verdict] for o in judged]
    parts += ["### Claim by claim", _flat(ABOUT_CLAIMS.format(margin=MARGIN)), f"Of {len(judged)} claims: {total}."]
    parts += [markdown_table(["claim", "source", "measured", "verdict"], claims, left=4), _stand_in(about)]
    return "\n\n".join(parts) + "\n"


def check_marks(path: Path, begin: str = BEGIN, end: str = END) -> None:
    """Raises ValueError where path is no file with one begin mark before one end mark."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise ValueError(f"{path} has no place for the tables: put the lines {begin} and {end} where they shall stand.")


def replace_between_marks(path: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Puts text between the two marks in path, whole or not at all; raises as check_marks."""
    check_marks(path, begin, end)
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    with replacing(path) as temporary:
        temporary.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def _cells(row: Any, baselines: Sequence[str]) -> dict[str, str]:
    cells = {
        "variant": f"`{row.variant}`",
        "parameters": f"{row.cost.parameters:,}",
        "MACs": f"{row.cost.macs / 1e6:.2f} M",
        "+ attention": f"{row.cost.macs_attention / 1e6:.2f} M",
        "accuracy, %": plus_minus(row.accuracy, 2),
    }
    for name in baselines:
        difference = row.differences.get(name)
        cells[f"Δ {name}"] = "–" if difference is None else _interval(difference)
        cells[f"p {name}"] = "–" if difference is None else _p(row.corrected[name])
    return cells | {"NaN": f"{row.diverged} of {len(row.accuracies)}"}


def _interval(found: Estimate) -> str:
    if not found.count:
        return "–"
    if not math.isfinite(found.low):
        return f"{found.mean:+.2f}"
    return f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _filled(about: Mapping[str, Any]) -> str:
    height, width = about["size"]
    return _flat(
        ABOUT.format(
            parameters=_range(about["parameters"]),
            data=about["data"],
            height=height,
            width=width,
            train=f"{about['train_images']:,}",
            held_out=f"{about['held_out_images']:,}",
            seeds=about["seeds"],
            epochs=about["epochs"],
            torch=about["packages"]["torch"],
            timm=about["packages"]["timm"],
            commit=_commit(about),
        )
    )


def _stand_in(about: Mapping[str, Any]) -> str:
    """The line under every table."""
    return (
        f"*Stand-in of {_range(about['parameters'])} parameters; {about['data']}, {about['train_images']:,} training"
        f" and {about['held_out_images']:,} held-out images; {about['seeds']} seeds, {about['epochs']} epochs, one"
        f" thread, torch {about['packages']['torch']}, commit {_commit(about)}.*"
    )


def _commit(about: Mapping[str, Any]) -> str:
    commit = about["commit"] or "unknown"
    return commit[:7] + ("-dirty" if commit.endswith("-dirty") else "")


def _range(ends: Sequence[int]) -> str:
    return " to ".join(f"{end:,}" for end in dict.fromkeys(ends))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A Markdown table whose first columns stand left and the others right."""
    lines = [head, ["---" if number < left else "---:" for number in range(len(head))]]
    lines += [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plus_minus(found: Estimate, digits: int) -> str:
    """`91.24 ± 0.35`: mean and half of the interval, or the mean alone where the interval is unbounded."""
    if not found.count:
        return "–"
    half = (found.high - found.low) / 2
    return f"{found.mean:.{digits}f} ± {half:.{digits}f}" if math.isfinite(half) else f"{found.mean:.{digits}f}"


def _flat(text: str) -> str:
    return " ".join(text.split())
