"""Which blocks of a network can be linear: what replacing each costs in error and saves in time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, integer_ticks, subplots, write_figure
from linvit.analysis.markdown import check_marks, copy_figures, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.bench.clock import Timing, clock_for, interleave
from linvit.bench.machine import check_device, describe, sentence
from linvit.bench.options import Device, Threads
from linvit.environment import using_threads
from linvit.errors import SettingError
from linvit.files import user_path, write_json, write_text
from linvit.layers.operator import Lesson
from linvit.models.linearizing import Origin, lessons, letters_of
from linvit.ranges import Count, Range, check
from linvit.runs import Run
from linvit.studies.comparison import Say, silent
from linvit.tasks.alignment import Alignment, answering
from linvit.tasks.students import relative_errors

ARGUMENTS = {
    "size": Annotated[int, Range(1)] | tuple[Count, Count] | None,
    "budget": Annotated[float, Range(above=0)] | None,
    "images": Count,
    "batch": Count,
    "threads": Threads,
    "rounds": Count,
    "device": Device,
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
ABOUT = """Errors on {images} held-out images; times at {height}×{width} px, batch {batch}, {dtype}, median of {rounds}
rounds, {machine}. The error is |student - teacher|² / |teacher|² of the features if only the attention of this letter
is linear; saved is the time of the softmax attention minus that of the linear one."""


@dataclass(frozen=True)
class Letter:
    """What one letter of the pattern decides: error if only its attention is linear, and times of its attention."""

    index: int
    layers: tuple[str, ...]
    error: float
    softmax_ms: float
    linear_ms: float

    @property
    def saved_ms(self) -> float:
        return self.softmax_ms - self.linear_ms

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "letter": str(self.index + 1),
            "attention": ", ".join(self.layers),
            "error": f"{self.error:.4f}",
            "softmax, ms": f"{self.softmax_ms:.2f}",
            "linear, ms": f"{self.linear_ms:.2f}",
            "saved, ms": f"{self.saved_ms:.2f}",
        }


@dataclass(frozen=True)
class Proposal:
    """A pattern, with the error and the time predicted as sums over its letters, and as measured."""

    pattern: str
    predicted_error: float
    error: float
    predicted_ms: float
    ms: float

    def cells(self) -> dict[str, str]:
        """A row of the table."""
        return {
            "pattern": self.pattern,
            "error, predicted": f"{self.predicted_error:.4f}",
            "error, measured": f"{self.error:.4f}",
            "ms, predicted": f"{self.predicted_ms:.2f}",
            "ms, measured": f"{self.ms:.2f}",
        }


@dataclass(frozen=True)
class LinearizationPlan:
    """The letters, and the proposals from no linear attention to all that saves time, fastest last.

    chosen: the proposal of least error within the budget, None without a budget. about: how it was measured.
    """

    letters: tuple[Letter, ...]
    proposals: tuple[Proposal, ...]
    chosen: Proposal | None
    about: str

    @property
    def advice(self) -> str:
        """The chosen pattern, or that none is faster, as a sentence; empty if all proposals are left to choose from."""
        if len(self.proposals) == 1:
            return "No linear attention saves time at this size: keep softmax attention, or plan for larger images."
        return "" if self.chosen is None else f"Chosen: {self.chosen.pattern}."

    def markdown(self) -> str:
        """Both tables, as Markdown."""
        letters, proposals = ([row.cells() for row in rows] for rows in (self.letters, self.proposals))
        between = "Patterns, from all softmax to as much linear as saves time:"
        parts = [self.about, markdown_rows(letters, 2), between, markdown_rows(proposals, 1), self.advice]
        return "\n\n".join(filter(None, parts)) + "\n"

    def figure(self) -> Figure:
        """The error of each letter, and error against time of the proposals."""
        figure, (left, right) = subplots((WIDTH, 2.8), 1, 2)
        left.bar([x.index + 1 for x in self.letters], [x.error for x in self.letters], color=COLOURS[0])
        left.set(xlabel="letter of the pattern", ylabel="relative error, alone", ylim=(0, None))
        integer_ticks(left.xaxis)
        predicted = [x.predicted_ms for x in self.proposals], [x.predicted_error for x in self.proposals]
        right.plot(*predicted, color=COLOURS[3], linestyle="--", label="predicted")
        right.plot(
            [x.ms for x in self.proposals], [x.error for x in self.proposals], "o", color=COLOURS[0], label="measured"
        )
        ends = ((self.proposals[0], "right", (10, -13)), (self.proposals[-1], "left", (6, 6)))
        for x, side, shift in ends[: len(self.proposals)]:
            where = {"xytext": shift, "textcoords": "offset points", "ha": side, "fontsize": SMALL}
            right.annotate(f"{x.pattern.count('S')} softmax", (x.ms, x.error), **where)
        if self.chosen is not None:
            right.plot(self.chosen.ms, self.chosen.error, "s", color=COLOURS[1], label=self.chosen.pattern)
        highest = max(x.error for x in self.proposals) or 1.0
        right.set(xlabel="time, ms", ylabel="relative error", ylim=(-0.14 * highest, 1.15 * highest))
        right.margins(x=0.1)
        right.legend(fontsize=SMALL)
        return figure

    def save(self, folder: str | Path) -> Path:
        """Writes report.html, plan.md, plan.json and the figure plan; returns the page."""
        folder, figure = user_path(folder), self.figure()
        write_json(folder / "plan.json", asdict(self))
        shown = figure_image(figure, "error and time")
        letters, proposals = (table([row.cells() for row in rows]) for rows in (self.letters, self.proposals))
        advice = [paragraph(self.advice)] if self.advice else []
        sections = [("Letters", [paragraph(self.about), shown, letters]), ("Patterns", [proposals, *advice])]
        write_page(folder / PAGE, "Plan of a linearization", sections)
        write_figure(figure, folder / "plan")
        write_text(folder / "plan.md", f"# Plan\n\n![error and time](plan.svg)\n\n{self.markdown()}")
        return folder / PAGE

    def publish(self, folder: Path, page: Path) -> None:
        """Puts tables and figure of the folder, see `save`, between the marks of a Markdown file that have its name."""
        copy_figures(folder, "plan.svg", page, f"{folder.name}_")
        text = f"![error and time]({folder.name}_plan.svg)\n\n{self.markdown()}"
        replace_between_marks(page, text, *marks(folder.name))


class Hybrid:
    """A student and its teacher as one network, in which each attention is the linear or the present one.

    letters: the lessons that each letter of the pattern decides about, by its place in the pattern.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, taught: Sequence[Lesson]) -> None:
        self.network = student
        places = letters_of(teacher)
        self.count = max(places.values()) + 1
        self.letters: dict[int, list[Lesson]] = {}
        for lesson in taught:
            self.letters.setdefault(places[lesson.layer], []).append(lesson)

    def pattern(self, linear: Iterable[int]) -> str:
        """The pattern in which these letters are linear."""
        chosen = set(linear)
        return "".join("L" if place in chosen else "S" for place in range(self.count))

    @contextmanager
    def having(self, pattern: str) -> Iterator[nn.Module]:
        """The network with that pattern."""
        with ExitStack() as stack:
            for place, taught in self.letters.items():
                for lesson in taught if pattern[place] == "S" else ():
                    stack.enter_context(answering(self.network.get_submodule(lesson.layer), lesson.present))
            yield self.network

    @torch.inference_mode()
    def features(self, pattern: str, images: Tensor) -> Tensor:
        """What the network computes from images (batch, channels, height, width), before its head if it has one."""
        with self.having(pattern) as network:
            return getattr(network, "forward_features", network)(images)


@dataclass(frozen=True)
class Times:
    """How times are measured: on the device and in the dtype of the images."""

    images: Tensor
    threads: int
    rounds: int

    def of(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each call, measured in turn."""
        timings: dict[str, Timing] = {}
        with torch.inference_mode():
            interleave(calls, clock_for(self.images.device.type, self.threads), self.rounds, timings)
        return {name: timing.median_ms for name, timing in timings.items()}

    def of_layers(self, hybrid: Hybrid) -> dict[str, tuple[float, float]]:
        """Milliseconds of the present and of the linear attention of each lesson."""
        calls: dict[str, Callable[[], object]] = {}
        taught = [lesson for group in hybrid.letters.values() for lesson in group]

        def note(lesson: Lesson, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[f"S {lesson.layer}"] = partial(lesson.present, *args, **kwargs)
            calls[f"L {lesson.layer}"] = partial(layer, *args, **kwargs)

        with ExitStack() as stack, torch.inference_mode():
            for lesson in taught:
                layer = hybrid.network.get_submodule(lesson.layer)
                handle = layer.register_forward_pre_hook(partial(note, lesson), with_kwargs=True)
                stack.callback(handle.remove)
            hybrid.network(self.images)
        ms = self.of(calls)
        return {lesson.layer: (ms[f"S {lesson.layer}"], ms[f"L {lesson.layer}"]) for lesson in taught}

    def of_patterns(self, hybrid: Hybrid, patterns: Sequence[str]) -> dict[str, float]:
        """Milliseconds of the whole network with each pattern."""

        def call(pattern: str) -> object:
            with hybrid.having(pattern) as network:
                return network(self.images)

        return self.of({pattern: partial(call, pattern) for pattern in patterns})


def plan_linearization(
    run: Run,
    size: int | tuple[int, int] | None = None,
    budget: float | None = None,
    images: int = 256,
    batch: int = 1,
    threads: int = 1,
    rounds: int = 7,
    device: str = "cpu",
    output: str | Path | None = None,
    progress: Say = silent,
    write: str | Path | None = None,
) -> LinearizationPlan:
    """How replaceable the softmax attention of a network is, letter by letter of the pattern, and what follows.

    Letters become linear in the order of error over saved time, and those that save no time never do. Error and time of
    a pattern are predicted as sums over its letters, and measured.

    Args:
        run: a run of the task alignment: its teacher and its aligned student.
        size: height and width in pixels at which times are measured, with new weights; None for those of the run.
        budget: milliseconds for one batch; chooses the pattern of least error within it.
        images: number of held-out images on which errors are measured.
        batch, threads, rounds: of the measurement of times.
        device: where times are measured: on the "cpu" in float32, or on a GPU ("cuda") in bfloat16, as CUDA graphs.
        output: folder for report.html, plan.md, plan.json and the figure; None writes nothing.
        progress: called with a line before each step.
        write: a Markdown file; the text between its two marks with the name of `output` is replaced by tables and
            figure.

    Raises ValueError for a run of another task, a size that the network cannot take, a GPU that is not there, `write`
    without `output`, a file without marks, and a budget that no pattern meets; the plan is written before that.
    """
    measured = {"batch": batch, "threads": threads, "rounds": rounds, "device": device}
    check(ARGUMENTS, {"size": size, "budget": budget, "images": images, **measured})
    check_device(device)
    folder, page = (None if path is None else user_path(path) for path in (output, write))
    if page is not None:
        if folder is None:
            raise SettingError("`write` is set, but not `output`, whose name its marks have: set both.")
        check_marks(page, *marks(folder.name))
    task = run.task
    if not isinstance(task, Alignment):
        raise ValueError(f"The run {run.folder} is not of the task alignment: train a recipe with that task first.")
    progress("Measuring the error of each block")
    network, place = run.placed_network()
    hybrid = Hybrid(network, task.to(place).original, task.lessons)
    batches = [images.to(place) for images in _batches(run, images)]
    expected = [hybrid.features(hybrid.pattern(()), images) for images in batches]

    def error(pattern: str) -> float:
        pairs = zip(batches, expected, strict=True)
        errors = [relative_errors(hybrid.features(pattern, images), features) for images, features in pairs]
        return torch.cat(errors).mean().item()

    alone = {index: error(hybrid.pattern([index])) for index in hybrid.letters}
    height, width = (size, size) if isinstance(size, int) else size or run.preprocessing.size
    progress(f"Measuring times at {height}×{width} px")
    random = torch.randn(batch, run.preprocessing.channels, height, width).to(device, DTYPES[device])
    timed, times = _new_pair(cast(Origin, network.origin), random), Times(random, threads, rounds)
    with using_threads(threads):
        layers = times.of_layers(timed)
        letters = []
        for index, taught in hybrid.letters.items():
            softmax, linear = (sum(layers[lesson.layer][linear] for lesson in taught) for linear in (0, 1))
            letters.append(Letter(index, tuple(lesson.layer for lesson in taught), alone[index], softmax, linear))
        saving = sorted((x for x in letters if x.saved_ms > 0), key=lambda x: x.error / x.saved_ms)
        nested = [saving[:count] for count in range(len(saving) + 1)]  # no letter, the cheapest, the two cheapest …
        patterns = [hybrid.pattern(x.index for x in linear) for linear in nested]
        ms = times.of_patterns(timed, patterns)
    proposals = [
        Proposal(
            pattern,
            predicted_error=sum(x.error for x in linear),
            error=error(pattern),
            predicted_ms=ms[patterns[0]] - sum(x.saved_ms for x in linear),
            ms=ms[pattern],
        )
        for pattern, linear in zip(patterns, nested, strict=True)
    ]
    facts = {"images": sum(map(len, batches)), "height": height, "width": width, "batch": batch, "rounds": rounds}
    facts["dtype"] = str(random.dtype).removeprefix("torch.")
    about = ABOUT.format(**facts, machine=sentence(describe(device, threads)))
    within = [] if budget is None else [x for x in proposals if x.ms <= budget]
    chosen = min(within, key=lambda x: x.error, default=None)
    plan = LinearizationPlan(tuple(letters), tuple(proposals), chosen, about)
    if folder is not None:
        plan.save(folder)
    if folder is not None and page is not None:
        plan.publish(folder, page)
    if budget is not None and chosen is None:
        fastest = min(x.ms for x in proposals)
        raise SettingError(f"`budget` is {budget} ms, but the fastest pattern takes {fastest:.2f} ms: allow more time.")
    return plan


def _batches(run: Run, count: int) -> list[Tensor]:
    """The first held-out images that can be read."""
    batches: list[Tensor] = []
    for images, *_ in run.source().val_dataloader():
        missing = count - sum(map(len, batches))
        if missing <= 0:
            break
        if images is not None:
            batches.append(images[:missing])
    if not batches:
        raise ValueError("The data contains no readable image: choose other data.")
    return batches


def _new_pair(origin: Origin, images: Tensor) -> Hybrid:
    """A teacher and a student for images of that size, device and dtype, with new weights."""
    height, width = images.shape[-2:]
    of_size = replace(origin, base={**origin.base, "img_size": (height, width)})
    try:
        try:
            teacher = of_size.teacher()
        except TypeError:  # a network for images of any size
            teacher = origin.teacher()
        teacher.eval()
        student = origin.student(teacher)
        embedding = getattr(teacher, "patch_embed", None)
        check({"grid": tuple[Count, Count]}, {"grid": getattr(embedding, "grid_size", None) or (1, 1)})
    except (AssertionError, ValueError) as error:
        raise SettingError(f"`size` is {height}×{width}, but {origin.base['name']} cannot take it: {error}.") from error
    for network in (teacher, student):
        network.to(images)
    return Hybrid(student, teacher, lessons(student, teacher))
