"""Whether the tests notice mistakes: makes each mistake of mutants.yaml and runs the tests that should fail.

A mutant is the package with one plausible mistake: a sign, an axis, an eps, a mask, an index. It is killed if one of
its tests fails. The checkout is never edited: package and tests are copied to a temporary folder, and the copy is
changed. To save the time of imports, each mutant's tests run in a fork of a process that has already imported torch,
timm and Lightning (not linvit).

    python tests/mutants/run.py                     all, on one quiet core in some 20 minutes
    python tests/mutants/run.py --only "ops_*"      those whose names fit one of the patterns
    python tests/mutants/run.py --unchanged         the same tests without mistakes: all have to pass

Ends with status 1 if a mutant survives, unless mutants.yaml says so (`survives`: why no test finds it), and if a text
is not found. A text is looked for in `file`, or, if it has moved, in the whole package; `in` names its function.
"""

import argparse
import ast
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from fnmatch import fnmatch
from multiprocessing.connection import wait
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("linvit", "linvit_cli", "tests", "recipes", "pyproject.toml")
PRELOADED = ("torch", "torchvision", "timm", "torchmetrics", "lightning.pytorch", "pytest", "numpy", "PIL.Image")
LIMIT = 600  # seconds for the tests of one mutant


def changed(source: str, mutant: dict[str, str]) -> str | None:
    """The source of a file with the mistake; None unless it has the text exactly once (in the function `in`)."""
    if mutant["find"] not in source:
        return None
    start, end = 0, len(source)
    if "in" in mutant:
        functions = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef) and node.name == mutant["in"]
        ]
        lines = source.splitlines(keepends=True)
        spans = [("".join(lines[: f.lineno - 1]), "".join(lines[f.lineno - 1 : f.end_lineno])) for f in functions]
        spans = [(len(before), len(before) + len(text)) for before, text in spans if text.count(mutant["find"]) == 1]
        if len(spans) != 1:
            return None
        start, end = spans[0]
    if source.count(mutant["find"], start, end) != 1:
        return None
    return source[:start] + source[start:end].replace(mutant["find"], mutant["replace"]) + source[end:]


def mutated(root: Path, mutant: dict[str, str]) -> tuple[Path, str]:
    """The file that gets the mistake, and its new source; raises ValueError unless there is exactly one place."""
    suffix = Path(mutant["file"]).suffix
    for files in ([root / mutant["file"]], sorted((root / "linvit").rglob(f"*{suffix}"))):
        sources = [(path, changed(path.read_text(encoding="utf-8"), mutant)) for path in files if path.is_file()]
        places = [(path, source) for path, source in sources if source is not None]
        if len(places) == 1:
            return places[0]
    raise ValueError(f"the text {mutant['find']!r} is not there exactly once")


def run_tests(copy: Path, tests: list[str]) -> None:
    """Runs the tests in this process, with what they print in copy/log, and ends it with pytest's status."""
    import pytest

    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)
    log = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os._exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]))


def started(base: Path, folder: Path, mutant: dict) -> multiprocessing.Process:
    """A process that runs a mutant's tests; `find` is missing for the unchanged package."""
    shutil.copytree(base, folder)
    if "find" in mutant:
        path, source = mutated(folder, mutant)
        path.write_text(source, encoding="utf-8")
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, mutant["tests"]))
    process.start()
    return process


def outcomes(mutants: dict[str, dict], jobs: int, base: Path):
    """Yields name, outcome, seconds and log of each mutant as it ends: killed, survived, or what went wrong."""
    waiting, running = list(mutants), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            folder = base.parent / name
            try:
                running[name] = started(base, folder, mutants[name]), folder, time.monotonic()
            except ValueError as error:
                yield name, f"not made: {error}", 0.0, ""
        wait([process.sentinel for process, _, _ in running.values()], timeout=1)
        for name, (process, folder, begun) in list(running.items()):
            seconds = time.monotonic() - begun
            if process.is_alive() and seconds < LIMIT:
                continue
            code = process.exitcode
            process.kill()
            process.join()
            outcome = {0: "survived", 1: "killed", None: f"killed: no end after {LIMIT} s"}.get(code)
            if outcome is None:
                outcome = "killed: a crash" if code < 0 else f"not tested: status {code} of pytest"
            yield name, outcome, seconds, (folder / "log").read_text(errors="replace")
            shutil.rmtree(folder)
            del running[name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names, such as 'ops_*'")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at once")
    parser.add_argument("--unchanged", action="store_true", help="run the tests without mistakes")
    parser.add_argument("--verbose", action="store_true", help="show what the tests print")
    args = parser.parse_args()
    listed = yaml.safe_load((Path(__file__).parent / "mutants.yaml").read_text(encoding="utf-8"))
    mutants = {name: mutant for name, mutant in listed.items() if any(fnmatch(name, only) for only in args.only)}
    if args.unchanged:
        mutants = {test.replace("/", "."): {"tests": [test]} for m in mutants.values() for test in m["tests"]}
    for name in PRELOADED:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    wanted, unexpected = "survived" if args.unchanged else "killed", []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            (base / name).parent.mkdir(exist_ok=True)
            copy(ROOT / name, base / name)
        for name, outcome, seconds, log in outcomes(mutants, args.jobs, base):
            expected = outcome.startswith("survived" if "survives" in mutants[name] else wanted)
            unexpected += [] if expected else [name]
            print(f"{name:<40} {outcome}, {seconds:.0f} s{'' if expected else '  <-- unexpected'}", flush=True)
            if args.verbose or (args.unchanged and not expected):
                print(log)
    print(f"{len(mutants) - len(unexpected)} of {len(mutants)} as expected", *unexpected, sep="\n  ")
    return int(bool(unexpected))


if __name__ == "__main__":
    sys.exit(main())
