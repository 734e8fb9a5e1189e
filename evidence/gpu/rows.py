"""Rows: a JSON line per measured case in rows/JOB.jsonl, with what it holds for and where; the tables made of them."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from evidence.gpu.carry import COMMIT, ROOT
from evidence.gpu.networks import describe
from linvit.analysis.markdown import markdown_rows, marks, replace_between_marks
from linvit.environment import commit
from linvit.kernels.record import digest_of_files

PAGE = ROOT / "docs" / "evidence" / "gpu.md"
NOT_MEASURED = "Not measured yet."
SMI = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"

Row = dict[str, Any]
KEY = ("job", "case", "card", "torch", "triton", "code")
"""What a row holds for. code: a digest of the code that was measured, without comments."""


def card() -> tuple[str, str, str]:
    """The card here, and the versions of torch and Triton."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return name, torch.__version__, version("triton")


@cache
def code_digest(code: tuple[str, ...], exact: bool = True) -> str:
    """A digest of folders and files of the repository, without comments; of a package of others its name and version.

    Without `exact`, a package's name alone: another machine may have another version of it.
    """
    paths = [ROOT / name for name in code if (ROOT / name).exists()]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return digest_of_files(files)[:16] if files else " ".join([*code, *(map(version, code) if exact else ())])


def about() -> Row:
    """The machine beside the card, and the commit of the code."""
    written = COMMIT.read_text().strip() if COMMIT.exists() else "unknown"
    return {**describe("cpu", torch.get_num_threads()), "cuda": torch.version.cuda, "commit": commit() or written}


def clocks() -> Row:
    """Driver, clocks, power and temperature of the card at this moment; nothing without a card."""
    command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(SMI.split(","), line.split(", "), strict=False))


def append(folder: Path, row: Row) -> None:
    """Writes a row at once, so that nothing measured is lost; on a line of its own, should the last one be torn."""
    with (folder / f"{row['job']}.jsonl").open("a+b") as file:
        file.seek(-1 if file.tell() else 0, os.SEEK_END)
        torn = file.read() not in (b"", b"\n")
        file.write(b"\n" * torn + json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, job: str) -> list[Row]:
    """The rows of a job, without a line that was cut off."""
    file, rows = folder / f"{job}.jsonl", []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def newest(rows: Iterable[Row]) -> dict[tuple[str, ...], Row]:
    """The last row of every key."""
    return {tuple(row[name] for name in KEY): row for row in rows}


def most_complete(cases: dict[str, str], rows: Iterable[Row]) -> tuple[str, int]:
    """The card with the most rows of the cases (name → code, not exact), in words, and how many these are."""
    counts = Counter(
        f"{card}, torch {torch_version}, Triton {triton}"
        for _, case, card, torch_version, triton, code in newest(rows)
        if case in cases and code.startswith(cases[case])
    )
    return next(iter(counts.most_common(1)), ("", 0))


def write_tables(jobs: Iterable[str], folder: Path, page: Path = PAGE) -> None:
    """Puts the tables of jobs between their marks in the page."""
    for name in jobs:
        replace_between_marks(page, f"\n{section(read(folder, name))}\n\n", *marks(f"gpu {name}"))


def section(rows: Sequence[Row]) -> str:
    """The tables of a job, card by card, of the newest row of every case; what has failed stands below them."""
    cards: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in newest(rows).values():
        cards.setdefault((row["card"], row["torch"], row["triton"]), {})[row["case"]] = row
    parts = []
    for card, by_case in cards.items():
        parts.append(sentence(card, list(by_case.values())))
        tables: dict[tuple[str, ...], list[dict[str, object]]] = {}
        for cells in (cells for row in by_case.values() for cells in row.get("cells", ())):
            tables.setdefault(tuple(cells), []).append(cells)
        for table in tables.values():
            words = next((n for n, value in enumerate(table[0].values()) if not isinstance(value, str)), len(table[0]))
            parts.append(markdown_rows([{name: shown(x) for name, x in cells.items()} for cells in table], left=words))
        parts.append("\n".join(f"- {case}: {row['failed']}" for case, row in by_case.items() if "failed" in row))
    return "\n\n".join(filter(None, parts)) or NOT_MEASURED


def sentence(card: tuple[str, ...], rows: Sequence[Row]) -> str:
    """Where, and of what code, rows are."""
    about = [row["about"] for row in rows]
    commits = sorted(
        {f"{machine['commit'][:12]}{'-dirty' * machine['commit'].endswith('-dirty')}" for machine in about}
    )
    clocks = sorted(machine["clocks.sm"] for machine in about if "clocks.sm" in machine)
    facts = [f"{card[0]}, torch {card[1]}, Triton {card[2]}", f"{about[0]['cores']} cores of {about[0]['processor']}"]
    if clocks:
        facts.append(f"driver {about[0]['driver_version']}, limit {about[0]['power.limit']}")
        facts.append(f"multiprocessors at {clocks[0]} to {clocks[-1]} after a row")
    return f"{'; '.join(facts)}; commit {', '.join(commits)}."


def shown(value: object) -> str:
    """A cell: three digits of a number, a dash where there is none."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "–" if value is None else str(value)
