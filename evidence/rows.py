"""The rows of the table of evidence: what each runs, and what is left of it."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence.study import Runs
from linvit.studies import compare
from linvit.studies.comparison import plan_comparison

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
UNKNOWN = "run whenever it is asked for"


@dataclass(frozen=True)
class Call:
    """What `python -m evidence run` was asked for.

    on: an accelerator such as "gpu"; "" trains on the CPU, where there is a compiler with the C++ kernel. workers: runs
    at once. seeds: of the studies, None for those of the table. again: trains also what a ledger has, where later runs
    need the weights. note: a sentence for model cards. cifar: the folder of CIFAR-10. encoder: a
    folder with the files of MiniLM. recognizer: the ONNX file of the text recognizer. books: a folder of books.
    """

    on: str = ""
    workers: int = 2
    seeds: int | None = None
    again: bool = False
    note: str = ""
    cifar: str = "data/cifar"
    encoder: str = "data/minilm"
    recognizer: str = "data/ch_PP-OCRv4_rec_infer.onnx"
    books: str = "data/books"

    @property
    def settings(self) -> list[str]:
        """What recipes are told about this machine."""
        if self.on:
            return [f"trainer.accelerator={self.on}"]
        return ["task.cpp=true"] if shutil.which("c++") else []


@dataclass(frozen=True)
class Claims:
    """A study of the papers' claims: the recipes of a folder in `recipes`, with its name; see `evidence.study`.

    data: in claims.csv. page: that with its marks. here: whether `Call.settings` apply.
    """

    recipes: str
    seeds: int
    data: str = ""
    first_seed: int = 0
    settings: tuple[str, ...] = ()
    page: str = "real-images"
    here: bool = True

    @property
    def name(self) -> str:
        name = Path(self.recipes).name
        return f"{name}_from_{self.first_seed}" if self.first_seed else name

    @property
    def ledger(self) -> str:
        return Path(self.recipes).name

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def runs(self, call: Call) -> Runs:
        """What is trained."""
        seeds = range(self.first_seed, self.first_seed + (call.seeds or self.seeds))
        settings = [*self.settings, *(call.settings if self.here else ())]
        recipes, ledger = Path("recipes") / self.recipes, EVIDENCE / f"{self.ledger}.jsonl"
        return Runs(recipes, Path("runs") / self.recipes, seeds, ledger, settings)

    def run(self, call: Call) -> None:
        self.runs(call).study(call.workers, EVIDENCE / f"{self.page}.md", print)

    def left(self, call: Call) -> str:
        return self.runs(call).left()


@dataclass(frozen=True)
class Comparison:
    """Recipes that are compared, the baseline first, as `linvit compare` does.

    page: that with its marks, "" for none. ledger: the name of its ledger, if it is not its own. weights: whether later
    runs start from those of its runs. folder: below runs. task, score, title: of the tables over several comparisons.
    counted: whether claims.csv has its differences. here: whether `Call.settings` apply.
    """

    name: str
    recipes: tuple[str, ...]
    over: str | None = None
    settings: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    seeds: int = 3
    first_seed: int = 0
    page: str = "real-images"
    ledger: str = ""
    weights: bool = False
    folder: str = ""
    task: str = "classification"
    score: str = "top1"
    title: str = ""
    counted: bool = True
    here: bool = True

    @property
    def names(self) -> list[str]:
        """The names of the recipes, the baseline first."""
        return [Path(recipe).name for recipe in self.recipes]

    @property
    def every_seed(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    def options(self, call: Call) -> dict[str, Any]:
        """The arguments of `compare` and of `plan_comparison`."""
        return {
            "recipes": [Path("recipes") / f"{recipe}.yaml" for recipe in self.recipes],
            "folder": Path("runs") / (self.folder or f"evidence/{self.name}"),
            "seeds": self.seeds,
            "over": self.over,
            "overrides": [*self.settings, *(call.settings if self.here else ())],
            "ledger": None if self.weights and call.again else EVIDENCE / f"{self.ledger or self.name}.jsonl",
            "first_seed": self.first_seed,
        }

    def run(self, call: Call) -> None:
        page = EVIDENCE / f"{self.page}.md" if self.page else None
        compare(**self.options(call), workers=call.workers, also=self.also, progress=print, write=page)

    def left(self, call: Call) -> str:
        return plan_comparison(**self.options(call)).left()


@dataclass(frozen=True)
class Bench:
    """A benchmark: `python -m evidence bench` with these words. page: that with its marks, "" for none."""

    name: str
    words: str
    page: str = ""
    folder: str = ""

    @property
    def output(self) -> Path:
        return Path("runs") / (self.folder or f"bench/{self.name.removeprefix('bench-')}")

    def run(self, call: Call) -> None:
        """Measures in a process of its own, unless its folder has been measured before."""
        if (self.output / "bench.json").is_file():
            return
        command = [sys.executable, "-m", "evidence", "bench", *shlex.split(self.words), "--output", str(self.output)]
        page = ["--write", str(EVIDENCE / f"{self.page}.md")] if self.page else []
        subprocess.run([*command, *page], check=True)

    def left(self, call: Call) -> str:
        return f"{self.output} is {'there' if (self.output / 'bench.json').is_file() else 'not measured'}"


@dataclass(frozen=True)
class Commands:
    """Command lines of linvit, in turn. made: a path, and the command that is run first where it is missing."""

    name: str
    lines: tuple[str, ...]
    made: tuple[str, str] | None = None

    def run(self, call: Call) -> None:
        if self.made is not None:
            path, command = self.made
            if not Path(path).exists():
                run_linvit(command, call)
                Path(path).touch()
        for line in self.lines:
            run_linvit(line, call)

    def left(self, call: Call) -> str:
        return UNKNOWN


def run_linvit(line: str, call: Call) -> None:
    words = shlex.split(line.replace("{cifar}", shlex.quote(call.cifar)))
    if words[0] == "convert":
        Path(words[2]).parent.mkdir(parents=True, exist_ok=True)
        words += ["--note", call.note] if call.note else []
    subprocess.run([sys.executable, "-m", "linvit_cli", *words], check=True)


@dataclass(frozen=True)
class Function:
    """A function of what was asked for."""

    name: str
    function: Callable[[Call], object]

    def run(self, call: Call) -> None:
        self.function(call)

    def left(self, call: Call) -> str:
        return UNKNOWN


Row = Claims | Comparison | Bench | Commands | Function
