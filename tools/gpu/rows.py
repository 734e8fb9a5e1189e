"""Rows: a JSON line per measured case in rows/JOB.jsonl, with what it holds for and where it was measured."""

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from linvit.bench.machine import describe
from linvit.environment import commit
from linvit.kernels.record import digest_of_files
from tools.gpu.carry import COMMIT, ROOT

SMI = "driver_version,clocks.sm,clocks.mem,power.draw,power.limit,temperature.gpu"

Row = dict[str, Any]


class Key(NamedTuple):
    """What a row holds for. code: a digest of the code that was measured, without comments."""

    job: str
    case: str
    card: str
    torch: str
    triton: str
    code: str


def key_of(row: Row) -> Key:
    return Key(*(row[name] for name in Key._fields))


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
    """The machine, and the commit of the code."""
    written = COMMIT.read_text().strip() if COMMIT.exists() else "unknown"
    facts = {"commit": commit() or written, "processor": describe("cpu", 1)["processor"], "cores": os.cpu_count()}
    return facts | {"python": platform.python_version(), "cuda": torch.version.cuda}


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
    folder.mkdir(parents=True, exist_ok=True)
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


def finished(rows: Iterable[Row]) -> dict[Key, Row]:
    """The rows with a result, or with the reason why there is none; a case that was stopped twice counts as one."""
    found, stopped = {}, Counter[Key]()
    for row in rows:
        stopped[key_of(row)] += "stopped" in row
        if "stopped" not in row or stopped[key_of(row)] > 1:
            found[key_of(row)] = row
    return found


def most_complete(cases: dict[str, str], rows: Iterable[Row]) -> tuple[str, int]:
    """The card with the most rows of the cases (name → code, not exact), in words, and how many these are."""
    counts = Counter(
        f"{done.card}, torch {done.torch}, Triton {done.triton}"
        for done in finished(rows)
        if done.case in cases and done.code.startswith(cases[done.case])
    )
    return next(iter(counts.most_common(1)), ("", 0))
