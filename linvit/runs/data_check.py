"""Finds out the format of a folder of data, reads all of it, counts it and lists what is wrong with it."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import yaml

from linvit.data.dense.annotations import read_annotations
from linvit.data.disk import collecting
from linvit.data.images.image import PAGED
from linvit.data.source import Content, Source, listed, untrained
from linvit.data.text.benchmarks import benchmarks_in, read_benchmark
from linvit.errors import refuse
from linvit.files import user_path
from linvit.ranges import allows, as_tuple, check, check_names, declared, lookup
from linvit.runs.progress import tracked
from linvit.runs.tasks import SOURCES

SPLITS = ("train", "val")
FALLBACKS = ("imagefolder", "textfolder")  # they fit almost every folder
BENCHMARKS = "benchmarks"
FILE_SETTINGS = {"needs_masks": bool}
RECOGNIZED = {name: kind for name, kind in SOURCES.items() if "found_in" in vars(kind)}


@dataclass(frozen=True)
class CheckedSplit:
    """The contents of a split.

    counts: amounts by what is counted. classes: amounts of each class, by its name and by what is counted. sizes: the
    smallest, median and largest size, (height, width) in pixels, (seconds,) of sound or (bytes,) of text.
    """

    name: str
    counts: dict[str, int]
    classes: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: list[tuple[float, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class CheckedData:
    """The result of check_data: the task, the settings `data` of a recipe, the splits, a sentence for each problem."""

    task: str
    settings: dict[str, Any]
    splits: list[CheckedSplit]
    problems: list[str]

    @property
    def benchmarks(self) -> list[str]:
        """The tasks of lm-evaluation-harness whose data they are, each a split; none for data of a recipe."""
        return [split.name for split in self.splits] if self.settings["name"] == BENCHMARKS else []

    @property
    def recipe(self) -> str:
        """The lines of a recipe that train on these data, in YAML."""
        values = {"task": {"name": self.task}, "data": self.settings}
        return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=math.inf)).strip()


def check_data(
    root: str | Path,
    format: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    progress: bool = False,
) -> CheckedData:
    """Reads every sample of a data set; files are only read.

    Args:
        root: folder of the data, or one .json file in COCO's format, whose annotations are then checked alone.
        format: `data.name` of the data in recipes; by default the only format that fits the folder.
        overrides: further settings of the data, as in recipes, such as {"needs_masks": False}.
        progress: shows a bar, or log lines if stderr is not a terminal.
    """
    overrides = overrides or {}
    root = user_path(root)
    PAGED.clear()
    refuse(not root.exists() and f"There is no {root}: give a folder of data.")
    if not root.is_dir():
        return _check_file(root, overrides)
    if format is None and (tasks := benchmarks_in(root)) and not _fitting(root):
        return _check_benchmarks(root, tasks, overrides)
    whole = find_format(root, format)
    source_class = SOURCES[whole["name"]]
    check_names("setting of the data", overrides, declared(source_class))
    if overrides.keys() & {"class_names", "classes", "num_labels", "values"}:
        whole = {key: value for key, value in whole.items() if key not in ("num_labels", "values")}  # only guessed
    elif "num_labels" in whole and allows(list[int], void := overrides.get("void", [])):
        whole["num_labels"] -= sum(label < whole["num_labels"] for label in {*void})
    whole |= overrides
    with collecting() as problems:
        source = source_class(**{key: as_tuple(value) for key, value in whole.items() if key != "name"})
        splits = [split for name in SPLITS for split in _checked(source, name, problems, progress)]
    why = problems[0] if problems else "add some."
    refuse(not splits and f"{root} has neither training nor validation data: {why}")
    return CheckedData(source.task, whole, splits, list(dict.fromkeys(problems)))


def find_format(root: Path, format: str | None = None) -> dict[str, Any]:
    """The settings `data` of a recipe for a folder of data."""
    if format is not None:
        return lookup("format", format, RECOGNIZED).found_in(root) or {"name": format, "root": str(root)}
    fitting = _fitting(root)
    names, inside, fallback = list(fitting), list[str](), None
    if not fitting:
        folders = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        inside = [f"{folder.name}/ ({' or '.join(_fitting(folder))})" for folder in folders if _fitting(folder)]
        fallback = next(filter(None, (RECOGNIZED[name].found_in(root) for name in FALLBACKS)), None)
    refuse(
        len(names) > 1
        and f"{root} fits the formats {', '.join(names[:-1])} and {names[-1]}: choose one with `format`, such as"
        f" `format={names[0]}`.",
        bool(inside) and f"{root} has data sets in its folders {listed(inside)}: check one of these folders.",
        not fitting
        and fallback is None
        and f"{root} is in none of the formats {', '.join(RECOGNIZED)}: choose another folder, or set `format` to learn"
        " what is missing.",
    )
    return fallback or fitting.popitem()[1]


def _fitting(root: Path) -> dict[str, dict[str, Any]]:
    """The settings of the data for each format that fits a folder, except those that fit almost every folder."""
    by_name = {name: source_class.found_in(root) for name, source_class in RECOGNIZED.items() if name not in FALLBACKS}
    return {name: settings for name, settings in by_name.items() if settings}


def _checked(source: Source, name: str, problems: list[str], progress: bool) -> Iterable[CheckedSplit]:
    """The contents of a split; nothing if the data have no such split, which becomes a problem."""
    earlier = len(problems)
    try:
        contents = source.contents(name)
    except ValueError as error:
        problems.append(str(error))
        return
    item = f"{contents.item or source.item}s"
    samples: list[Content] = []
    for content in tracked(contents, name, len(contents), progress):
        if isinstance(content, str):
            problems.append(content)
        else:
            samples.append(content)
    counts = Counter({item: len(samples)})
    by_class: dict[str, Counter[int]] = {}
    for sample in samples:
        counts.update(sample.others)
        for heading, amounts in sample.amounts.items():
            by_class.setdefault(heading, Counter()).update(amounts)
    counts.update(contents.others)
    if not samples and len(problems) == earlier:
        problems.append(f"The {name} data have no {contents.item or source.item} that can be used: add some.")
    if by_class and name == "train":
        heading, amounts = next(iter(by_class.items()))
        if absent := untrained(source.class_names, +amounts, heading[:-1], counts["ignored pixels"] > 0):
            problems.append(absent)
    classes = {
        class_name: {heading: amounts[label] for heading, amounts in by_class.items()}
        for label, class_name in enumerate(source.class_names if by_class else [])
    }
    sizes = sorted((sample.size for sample in samples), key=math.prod)
    extremes = [sizes[0], sizes[median_low(range(len(sizes)))], sizes[-1]] if sizes else []
    if "objects" in by_class:
        counts["objects"] = by_class["objects"].total()
    yield CheckedSplit(name, dict(counts), classes, extremes)


def _check_benchmarks(root: Path, tasks: list[str], overrides: Mapping[str, Any]) -> CheckedData:
    refuse(
        bool(overrides)
        and f"{root} has files of benchmarks, which have no settings, got {', '.join(overrides)}: leave it out."
    )
    splits, problems = [], []
    for task in tasks:
        try:
            splits.append(CheckedSplit(task, {"items": len(read_benchmark(task, root))}))
        except ValueError as error:
            problems.append(str(error))
    refuse(not splits and problems[0])
    return CheckedData("language", {"name": BENCHMARKS}, splits, problems)


def _check_file(path: Path, overrides: Mapping[str, Any]) -> CheckedData:
    """The annotations of one file in COCO's format, without its images."""
    check_names("setting of a file in COCO's format", overrides, FILE_SETTINGS)
    check(FILE_SETTINGS, overrides)
    known_annotations = read_annotations(path, **overrides)
    entries = [known_annotations.of_image(index) for index in range(len(known_annotations.images))]
    objects = Counter(entry["label"] for image in entries for entry in image if not entry["iscrowd"])
    classes = {name: {"objects": objects[label]} for label, name in enumerate(known_annotations.class_names)}
    counts = {"images": len(entries), "objects": objects.total()}
    return CheckedData(
        "detection", {"name": "coco"}, [CheckedSplit(path.name, counts, classes)], known_annotations.complaints
    )
