"""CPU seconds of each test file, kept in durations.csv, and what each room of the tests may take.

    make durations                       runs the default tests and writes the file
    make durations TESTS=tests/ops       the same for some folders or files
    python tests/durations.py            the check: every test file has a row, and no room is above its budget

CPU seconds of a process and of those that it starts; measure on a quiet machine, since what shares its caches adds to
them: a file of 6.5 seconds took 15.9 beside other work.
"""

import csv
import os
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
FILE = HERE / "durations.csv"
BUDGETS = {
    "": 50,
    "analysis": 15,
    "bench": 8,
    "cli": 8,
    "data": 13,
    "deploy": 11,
    "evidence": 31,
    "explorer": 4,
    "formulas": 6,
    "fusion": 12,
    "fuzz": 9,
    "kernels": 98,
    "layers": 8,
    "models": 66,
    "ops": 50,
    "parallel": 1,
    "runs": 160,
    "streaming": 8,
    "studies": 7,
    "tasks": 8,
}
"""CPU seconds of each folder, "" for the files in tests/ itself. Together they may be 960: 8 minutes of two cores."""
seconds: Counter[str] = Counter()


def cpu() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.user_properties.append(("cpu", -cpu()))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    if call.when == "teardown":
        item.user_properties.append(("cpu", cpu()))
    return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the main process: also of what the processes of xdist have run."""
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0].removeprefix("tests/")
        seconds[file] += sum(value for name, value in report.user_properties if name == "cpu")


def pytest_sessionfinish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    rows = {**read(), **seconds}
    lines = [f"{file},{rows[file]:.1f}" for file in sorted(rows) if (HERE / file).exists()]
    FILE.write_text("file,seconds\n" + "\n".join(lines) + "\n")


def read() -> dict[str, float]:
    """The seconds of each test file."""
    if not FILE.exists():
        return {}
    with FILE.open(newline="") as lines:
        return {row["file"]: float(row["seconds"]) for row in csv.DictReader(lines)}


def faults() -> list[str]:
    """Test files without a row, and rooms above their budget."""
    rows, rooms = read(), Counter[str]()
    files = [str(path.relative_to(HERE)) for path in sorted(HERE.rglob("test_*.py"))]
    for file in files:
        rooms[file.partition("/")[0] if "/" in file else ""] += rows.get(file, 0)
    return [
        *(f"tests/{file} has no row: make durations TESTS=tests/{file}" for file in files if file not in rows),
        *(
            f"tests/{room} takes {used:.0f} s of CPU time, its budget is {BUDGETS.get(room, 0)} s: share what is "
            "trained or exported, or mark what takes longest as slow"
            for room, used in sorted(rooms.items())
            if used > BUDGETS.get(room, 0)
        ),
    ]


if __name__ == "__main__":
    sys.exit("\n".join(faults()) or None)
