"""A recognizer of text lines with linear attention: aligned, distilled, and measured on rendered lines.

Both softmax attentions of `evidence.text_recognizer` become linear. Each first learns the output of the one that it
replaces (align); then all layers after the convolutional network but the classifier learn what the teacher computes
(distill). No labels are used. The convolutional network stays as it is, so its features are computed once.
"""

import copy
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from evidence.ocr_equality import equality
from evidence.ocr_page import write_results, write_times
from evidence.passages import chosen_books
from evidence.rows import EVIDENCE, Call
from evidence.steps import steps
from evidence.text_lines import HELD_OUT_FONTS, SEEN_FONTS, Line, by_width, lines_of, normalized
from evidence.text_recognizer import BLANK, Reader, Recognizer, decode, linearized, load_recognizer
from linvit.models.hugging_face_students import relative_error
from linvit.studies.comparison import Say
from linvit.studies.pool import Ledger

Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sample:
    """Lines of each of `books` books, in the order in which they are chosen; seed: of the lines."""

    books: int
    lines: int
    fonts: tuple[str, ...]
    seed: int


SAMPLES = {
    "test": Sample(20, 250, HELD_OUT_FONTS, 0),
    "development": Sample(10, 50, SEEN_FONTS, 1),
    "training": Sample(60, 50, SEEN_FONTS, 2),
}


@dataclass(frozen=True)
class Features:
    """What the convolutional network gives for the lines of each width, with the places of these lines among all."""

    lines: list[Line]
    groups: dict[int, tuple[Tensor, Tensor]]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Places (lines,) and features (lines, 480, 1, tokens), each line once."""
        for places, features in self.groups.values():
            for start in range(0, len(places), size):
                yield places[start : start + size], features[start : start + size].float()

    def draws(self, size: int, steps: int, seed: int) -> Iterator[Tensor]:
        """Features of batches in random order, each line once before any comes again; some batches are smaller."""
        generator = torch.Generator().manual_seed(seed)
        queue: list[tuple[int, Tensor]] = []
        for _ in range(steps):
            if not queue:
                shuffled = {
                    width: torch.randperm(len(places), generator=generator)
                    for width, (places, _) in self.groups.items()
                }
                batches = [(width, rows) for width, order in shuffled.items() for rows in order.split(size)]
                queue = [batches[i] for i in torch.randperm(len(batches), generator=generator)]
            width, rows = queue.pop()
            yield self.groups[width][1][rows].float()


@torch.inference_mode()
def features_of(recognizer: Recognizer, lines: list[Line]) -> Features:
    """In float16."""
    groups = {}
    for width, (places, images) in by_width(lines).items():
        given = [recognizer.features(normalized(image)).half() for image in images.split(1)]
        groups[width] = places, torch.cat(given)
    return Features(lines, groups)


def stored_features(folder: Path, recognizer: Recognizer, books: Path) -> dict[str, Features]:
    """Those of all samples, from files in the folder if they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    count, first = sum(sample.books for sample in SAMPLES.values()), 0
    stored = {}
    for name, sample in SAMPLES.items():
        path = folder / f"{name}.pt"
        if not path.exists():
            chosen = chosen_books(books, count)[first : first + sample.books]
            features = features_of(recognizer, lines_of(chosen, sample.lines, sample.fonts, sample.seed))
            torch.save({"lines": [asdict(line) for line in features.lines], "groups": features.groups}, path)
        read = torch.load(path)
        stored[name] = Features([Line(**line) for line in read["lines"]], read["groups"])
        first += sample.books
    return stored


@dataclass(frozen=True)
class Stage:
    """A part of the training. rates: each is tried for `trial` steps. seed: of the order of the lines."""

    steps: int
    trial: int
    rates: tuple[float, ...]
    batch: int = 32
    seed: int = 0


@dataclass(frozen=True)
class Study:
    """What is fixed before the runs. whole: of students that are not aligned; they read as many lines."""

    align: Stage = Stage(150, 50, (1e-3, 3e-3, 1e-2), seed=1)
    distill: Stage = Stage(450, 50, (3e-4, 1e-3, 3e-3), seed=2)
    whole: Stage = Stage(600, 50, (3e-4, 1e-3, 3e-3), seed=2)


@dataclass(frozen=True)
class Student:
    """pattern: L for blocks with linear attention. local: as in `Attention`. new: whether projections are random."""

    name: str
    mechanism: str
    pattern: str = "LL"
    local: int = 0
    new: bool = False
    stages: tuple[str, ...] = ("copied", "align", "distill")


MECHANISMS, LOCAL = ("linear", "mala", "rala"), 7
STUDENTS = (
    *[Student(mechanism, mechanism) for mechanism in MECHANISMS],
    *[
        Student(f"{mechanism}_{name}", mechanism, new=name == "new", stages=("whole",))
        for mechanism in MECHANISMS
        for name in ("not_aligned", "new")
    ],
    *[Student(f"{mechanism}_local", mechanism, local=LOCAL) for mechanism in MECHANISMS],
    *[
        Student(f"{mechanism}_block_{number}", mechanism, pattern, stages=("align",))
        for mechanism in MECHANISMS
        for number, pattern in ((1, "LS"), (2, "SL"))
    ],
)
"""In the order of the runs."""
POINTS = 5
"""Of the curve of a stage."""


def attention_error(student: Reader, teacher: Reader, features: Tensor) -> Tensor:
    """|student - teacher|² / |teacher|² of what a linear attention gives where it reads what the teacher's reads.

    The mean over the linear attentions, of which none waits for another.
    """
    errors = []
    with torch.no_grad():
        x = teacher.tokens(features)
    for block, learning in zip(teacher.blocks, student.blocks, strict=True):
        with torch.no_grad():
            read = block.norm1(x)
            wanted, x = block.attn(read), block(x)
        if learning.attn.mechanism != "softmax":
            errors.append(relative_error(learning.attn(read), wanted))
    return torch.stack(errors).mean()


def distillation(student: Reader, teacher: Reader, classes: Tensor, features: Tensor) -> Tensor:
    """The divergence of the teacher's distribution over these classes, per token, and the error of the states."""
    with torch.no_grad():
        wanted = teacher.states(features).flatten(0, 1)
    given, (weight, bias) = student.states(features).flatten(0, 1), (teacher.head.weight, teacher.head.bias)
    logs = [(states @ weight[classes].T + bias[classes]).log_softmax(-1) for states in (given, wanted)]
    return kl_div(logs[0], logs[1], log_target=True, reduction="batchmean") + relative_error(given, wanted)


@torch.inference_mode()
def texts_of(reader: Reader, features: Features, characters: list[str]) -> list[str]:
    """What is read in each line."""
    texts = [""] * len(features.lines)
    for places, given in features.batches(32):
        for place, text in zip(places.tolist(), decode(reader(given).argmax(-1), characters), strict=True):
            texts[place] = text
    return texts


def measures(student: list[str], teacher: list[str], lines: list[Line]) -> dict[str, Any]:
    """Shares of exact lines, and how many points fewer the student has, with a 95 % interval over books.

    Spaces count, except in the measures with "joined" in their name. same: lines in which both read the same.
    """
    books = torch.tensor([line.book for line in lines])
    result: dict[str, Any] = {"same": sum(map(str.__eq__, student, teacher)) / len(lines)}
    for name, space in (("", " "), ("joined_", "")):
        right = [
            torch.tensor(
                [a.replace(" ", space) == line.text.replace(" ", space) for a, line in zip(texts, lines, strict=True)]
            )
            for texts in (student, teacher)
        ]
        of_books = torch.stack(
            [(right[1].double() - right[0].double())[books == book].mean() for book in books.unique()]
        )
        draws = torch.randint(len(of_books), (2000, len(of_books)), generator=torch.Generator().manual_seed(0))
        low, high = of_books[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.double)).tolist()
        shares = [x.double().mean().item() for x in right]
        values = {"exact": shares[0], "teacher": shares[1], "lost": shares[1] - shares[0], "low": low, "high": high}
        result |= {f"{name}{key}": value for key, value in values.items()}
    return result


class Runs:
    """The runs of the study: finished stages are rows of the ledger, with weights in `folder`, and are not repeated."""

    def __init__(self, model: Path, books: Path, folder: Path, ledger: Path, study: Study = Study()) -> None:
        self.model, self.folder, self.ledger, self.study = model, folder, Ledger(ledger), study
        self.recognizer, self.characters = load_recognizer(model)
        self.teacher = self.recognizer.reader
        stored = stored_features(folder, self.recognizer, books)
        self.test, self.development, self.training = (stored[name] for name in SAMPLES)
        letters = {letter for line in self.training.lines for letter in line.text}
        self.classes = torch.tensor([BLANK, *sorted(map(self.characters.index, letters))])
        self.read = texts_of(self.teacher, self.test, self.characters)

    def run(self, say: Say) -> None:
        self.check(say)
        for student in STUDENTS:
            self.train(student, say)

    def check(self, say: Say) -> None:
        """How far our network is from its file on one line in 25 of the test, in a row of its own."""
        if self.ledger.result("teacher", values := {"lines": asdict(SAMPLES["test"])}) is None:
            result = equality(self.recognizer, self.model, self.test.lines[::25], self.characters)
            self.ledger.add("teacher", values, {"measures": result})
            say(f"teacher: in float64 at most {result['exact'][1]:.1e} from its file")

    def train(self, student: Student, say: Say) -> None:
        """The stages of a student that are left, in turn."""
        torch.manual_seed(0)
        reader = linearized(self.teacher, student.mechanism, student.pattern, student.local)
        if student.new:
            for block in reader.blocks:
                block.attn.qkv.reset_parameters()
                block.attn.proj.reset_parameters()
        for stage in student.stages:
            name, weights = f"{student.name} {stage}", self.folder / f"{student.name}_{stage}.pt"
            values = {**asdict(student), "stages": [], "study": asdict(self.study)}
            if self.ledger.result(name, values) is not None and weights.exists():
                reader.load_state_dict(torch.load(weights))
                continue
            trained = getattr(self.study, stage, None)
            result = self.learn(reader, stage, trained) if trained else {"seconds": 0.0, "lines": 0}
            measured = measures(texts_of(reader, self.test, self.characters), self.read, self.test.lines)
            torch.save(reader.state_dict(), weights)
            self.ledger.add(name, values, {**result, "pattern": student.pattern, "measures": measured})
            lost, low, high = (100 * measured[key] for key in ("lost", "low", "high"))
            say(f"{name}: {lost:.2f} [{low:.2f}, {high:.2f}] points of exact lines lost, {result['seconds']:.0f} s")

    def learn(self, reader: Reader, stage: str, trained: Stage) -> dict[str, Any]:
        """Trains in place, by the rate whose trial has the smallest error on the lines for development."""
        for name, parameter in reader.named_parameters():
            block = re.match(r"blocks\.(\d+)\.attn\.", name)
            linear = block is not None and reader.blocks[int(block[1])].attn.mechanism != "softmax"
            parameter.requires_grad_(linear if stage == "align" else not name.startswith("head."))
        learned = [parameter for parameter in reader.parameters() if parameter.requires_grad]
        start, trials, began = copy.deepcopy(reader.state_dict()), {}, time.process_time()
        for rate in trained.rates:
            batches = self.training.draws(trained.batch, trained.trial, trained.seed)
            deque(steps(learned, batches, self.loss(reader, stage), trained.trial, rate), maxlen=0)
            trials[rate] = self.error(reader, stage)
            reader.load_state_dict(start)
        rate = min(trials, key=trials.__getitem__)
        tried, began = time.process_time() - began, time.process_time()
        batches, curve = self.training.draws(trained.batch, trained.steps, trained.seed), []
        lines = 0
        taken = steps(learned, batches, self.loss(reader, stage), trained.steps, rate)
        for step, (features, _) in enumerate(taken, start=1):
            lines += len(features)
            if step % max(trained.steps // POINTS, 1) == 0:
                paused = time.process_time()
                curve.append([step, round(paused - began, 1), self.exact(reader), self.error(reader, stage)])
                began += time.process_time() - paused
        seconds = {"seconds": round(time.process_time() - began, 1), "tried_seconds": round(tried, 1)}
        return {**seconds, "lines": lines, "rate": rate, "trials": list(trials.items()), "curve": curve}

    def loss(self, reader: Reader, stage: str) -> Step:
        if stage == "align":
            return partial(attention_error, reader, self.teacher)
        return partial(distillation, reader, self.teacher, self.classes)

    @torch.no_grad()
    def error(self, reader: Reader, stage: str) -> float:
        """The mean loss of a stage over the lines for development."""
        loss, batches = self.loss(reader, stage), list(self.development.batches(32))
        return sum(loss(features).item() * len(places) for places, features in batches) / len(self.development.lines)

    def exact(self, reader: Reader) -> float:
        """The share of exact lines among those for development."""
        texts = texts_of(reader, self.development, self.characters)
        return sum(text == line.text for text, line in zip(texts, self.development.lines, strict=True)) / len(texts)


def run(call: Call) -> None:
    """Trains what is left of `STUDENTS`, and writes their tables."""
    torch.set_num_threads(1)
    ledger = EVIDENCE / "ocr.jsonl"
    Runs(Path(call.recognizer), Path(call.books), Path("runs/evidence/ocr"), ledger).run(print)
    write_results(EVIDENCE / "linearize.md", ledger)


def measure_times(call: Call) -> None:
    """Time against width, on a quiet machine."""
    torch.set_num_threads(1)
    write_times(Path(call.recognizer), EVIDENCE / "linearize.md")
