"""LAMBADA, PIQA, HellaSwag and WinoGrande from local files, as rows for the tasks of lm-evaluation-harness."""

import bz2
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linvit.data.disk import check_regular, files_below, read_text
from linvit.errors import SettingError
from linvit.files import explained
from linvit.ranges import lookup

Row = dict[str, Any]
HELLASWAG_LINES = 6
MARKS = {"validation": r"(?<![a-z])(val|valid|validation|dev)(?![a-z])", "test": r"(?<![a-z])test(?![a-z])"}


@dataclass(frozen=True)
class Benchmark:
    """Where the files of a benchmark are, and the columns that the harness's task reads.

    word: in the path of its file. split: the name of the split in the harness. definition: the task's file in the
    harness. formats: the endings of its file.
    """

    word: str
    split: str
    columns: tuple[str, ...]
    definition: str
    formats: tuple[str, ...] = (".jsonl", ".arrow")


BENCHMARKS = {
    "lambada_openai": Benchmark("lambada", "test", ("text",), "lambada/lambada_openai.yaml"),
    "lambada_standard": Benchmark("lambada", "test", ("text",), "lambada/lambada_standard.yaml"),
    "piqa": Benchmark("piqa", "validation", ("goal", "sol1", "sol2", "label"), "piqa/piqa.yaml"),
    "hellaswag": Benchmark(
        "hellaswag",
        "validation",
        ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
        "hellaswag/hellaswag.yaml",
        (".jsonl", ".arrow", ".txt", ".bz2"),
    ),
    "winogrande": Benchmark(
        "winogrande", "validation", ("sentence", "option1", "option2", "answer"), "winogrande/default.yaml"
    ),
}


def read_benchmark(task: str, folder: str | Path) -> list[Row]:
    """The rows of a task's data, with the columns of its Benchmark.

    The file is found at any depth by its path, which names the benchmark and the split: piqa/valid.jsonl with
    piqa/valid-labels.lst beside it, hellaswag_val.jsonl, lambada_test.jsonl, winogrande/validation/*.arrow (as
    `datasets` saves them), or hellaswag_val.txt, also .txt.bz2, with six lines per item: context, number of the right
    ending, four endings. Raises ValueError for an unknown task, a missing folder, no file or several, and a file that
    is damaged or lacks a column, naming its first wrong row.
    """
    benchmark, folder = lookup("task", task, BENCHMARKS), Path(folder)
    if not folder.is_dir():
        raise SettingError(f"`task_data` is {folder}, expected a folder with the files of the tasks: give one.")
    paths = _of(benchmark, folder, files_below(folder, READERS))
    if len(paths) != 1:
        names = ", ".join(path.relative_to(folder).as_posix() for path in paths[:5])
        raise ValueError(
            f"{folder} has {len(paths)} files for the task {task}{f' ({names})' if paths else ''}, expected one whose"
            f" path names {benchmark.word} and its {benchmark.split} split: add it, or remove the others."
        )
    (path,) = paths
    rows = READERS[path.suffix.lower()](path)
    if not rows:
        raise ValueError(f"{path} has no items of {task}: use another copy.")
    return [_checked(row, benchmark.columns, path, number) for number, row in enumerate(rows, start=1)]


def benchmarks_in(folder: Path) -> list[str]:
    """The tasks whose data a folder has, in the order of BENCHMARKS; of tasks that read the same file the first."""
    files = files_below(folder, READERS)
    tasks = {tuple(paths): task for task in reversed(BENCHMARKS) if (paths := _of(BENCHMARKS[task], folder, files))}
    return list(reversed(tasks.values()))


def _of(benchmark: Benchmark, folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files whose ending and path are those of the benchmark."""
    named = {path: Path(folder.resolve().name, path.relative_to(folder)).as_posix().lower() for path in files}
    marked = [path for path, name in named.items() if re.search(MARKS[benchmark.split], name)]
    return [path for path in marked if named[path].endswith(benchmark.formats) and benchmark.word in named[path]]


def _checked(row: Any, columns: Sequence[str], path: Path, number: int) -> Row:
    """The columns of an item that the harness reads."""
    missing = [name for name in columns if not isinstance(row, dict) or row.get(name) is None]
    if missing:
        raise ValueError(f"{path}, item {number}, has no {missing[0]!r}: correct it, or use another copy.")
    values = {name: row[name] for name in columns}
    if str(values.get("label")).isdecimal():
        values["label"] = int(values["label"])
    return values


def _json_lines(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        not_json = f"{path}, line {number}, is not JSON: correct it, or use another copy."
        with explained(not_json, (ValueError, RecursionError)):
            rows.append(json.loads(line))
    labels = path.with_name(f"{path.stem}-labels.lst")
    if not labels.is_file():
        return rows
    given = read_text(labels).split()
    if len(given) != len(rows):
        raise ValueError(f"{labels} has {len(given)} labels for {len(rows)} items: use another copy.")
    return [row | {"label": label} if isinstance(row, dict) else row for row, label in zip(rows, given, strict=True)]


def _arrow(path: Path) -> list[Any]:
    import datasets

    with explained(lambda reason: f"{path} cannot be read as Arrow ({reason}): use another copy."):
        check_regular(path)
        return list(datasets.Dataset.from_file(str(path)))


def _hellaswag_items(path: Path) -> list[Any]:
    """Items of six lines; the first is "activity: context", whose last sentence the endings may complete."""
    opener: Callable[..., Any] = bz2.open if path.suffix.lower() == ".bz2" else open
    with explained(
        lambda reason: f"{path} cannot be read as text ({reason}): use another copy.",
        (OSError, EOFError, UnicodeDecodeError),
    ):
        check_regular(path)
        with opener(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    lines = text.rstrip("\n").split("\n")
    if len(lines) % HELLASWAG_LINES:
        raise ValueError(f"{path} has {len(lines)} lines, expected {HELLASWAG_LINES} per item: use another copy.")
    items = []
    for start in range(0, len(lines), HELLASWAG_LINES):
        context, label, *endings = lines[start : start + HELLASWAG_LINES]
        activity, _, context = context.partition(": ")
        begun = re.search(r"(?<=[.!?]) ?([a-z][^.!?]*)$", context)
        cut = begun.start(1) if begun else len(context)
        values = activity, context[:cut].strip(), context[cut:], endings, label
        items.append(dict(zip(BENCHMARKS["hellaswag"].columns, values, strict=True)))
    return items


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _json_lines,
    ".arrow": _arrow,
    ".txt": _hellaswag_items,
    ".bz2": _hellaswag_items,
}
