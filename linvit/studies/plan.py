"""The plan of a linearization: its page, and how errors and times are measured."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from linvit.analysis.figures import COLOURS, SMALL, WIDTH, integer_ticks, subplots, write_figure
from linvit.analysis.markdown import copy_figures, markdown_rows, marks, replace_between_marks
from linvit.analysis.report import PAGE, figure_image, paragraph, table, write_page
from linvit.bench.clock import Timing, clock_for, interleave
from linvit.bench.machine import describe, sentence
from linvit.environment import using_threads
from linvit.errors import SettingError
from linvit.files import user_path, write_json, write_text
from linvit.layers.operator import Lesson
from linvit.studies.comparison import Say
from linvit.tasks.alignment import answering

ABOUT = """Errors on {held_out}; times {at}, {dtype}, median of {rounds}
rounds, {machine}. The error is |student - teacher|² / |teacher|² of the {features} if only the attention of this letter
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
            return "No linear attention saves time at this size: keep softmax attention, or plan for a larger one."
        return "" if self.chosen is None else f"Chosen: {self.chosen.pattern}."

    def check_budget(self, budget: float | None) -> None:
        """Raises SettingError if no proposal is within a budget in milliseconds."""
        if budget is not None and self.chosen is None:
            fastest = min(x.ms for x in self.proposals)
            raise SettingError(
                f"`budget` is {budget} ms, but the fastest pattern takes {fastest:.2f} ms: allow more time."
            )

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

    taught: what the student's attention replaces. places: the letter of the pattern, by its place in it, that decides
    about each attention of the teacher. letters: the lessons of each letter.
    """

    def __init__(self, student: nn.Module, taught: Sequence[Lesson], places: Mapping[str, int]) -> None:
        self.network = student
        self.count = max(places.values()) + 1
        self.letters: dict[int, list[Lesson]] = {}
        for lesson in taught:
            self.letters.setdefault(places[lesson.layer], []).append(lesson)

    def pattern(self, linear: Iterable[int]) -> str:
        """The pattern in which these letters are linear."""
        chosen = set(linear)
        return "".join("L" if place in chosen else "S" for place in range(self.count))

    @contextmanager
    def having(self, pattern: str) -> Iterator[None]:
        """Gives the network that pattern for a while."""
        with ExitStack() as stack:
            for place, taught in self.letters.items():
                for lesson in taught if pattern[place] == "S" else ():
                    stack.enter_context(answering(self.network.get_submodule(lesson.layer), lesson.present))
            yield

    def compute(self, inputs: Any) -> object:
        """The output of the network for inputs, images (batch, channels, height, width)."""
        return self.network(inputs)

    def described(self, inputs: Any) -> Tensor:
        """What the network computes from inputs before its head, if it has one."""
        features: Tensor = getattr(self.network, "forward_features", self.network)(inputs)
        return features

    @torch.inference_mode()
    def features(self, pattern: str, inputs: Any) -> Tensor:
        """The same with that pattern."""
        with self.having(pattern):
            return self.described(inputs)


@dataclass(frozen=True)
class Times:
    """How times are measured.

    inputs: as Hybrid.compute takes them. at: their size, in words. device, dtype: of inputs and networks. graphs:
    whether a GPU replays each call as a CUDA graph.
    """

    inputs: Any
    at: str
    device: str
    dtype: torch.dtype
    threads: int
    rounds: int
    graphs: bool = True

    def about(self, held_out: str, features: str) -> str:
        """What was measured and where. held_out: the inputs of the errors, features: what these are of, in words."""
        dtype, machine = str(self.dtype).removeprefix("torch."), sentence(describe(self.device, self.threads))
        facts = {"at": self.at, "dtype": dtype, "rounds": self.rounds, "machine": machine}
        return ABOUT.format(held_out=held_out, features=features, **facts)

    def of(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Milliseconds of each call, measured in turn."""
        timings: dict[str, Timing] = {}
        with torch.inference_mode():
            interleave(calls, clock_for(self.device, self.threads, self.graphs), self.rounds, timings)
        return {name: timing.median_ms for name, timing in timings.items()}

    def of_layers(self, hybrid: Hybrid) -> dict[str, tuple[float, float]]:
        """Milliseconds of the present and of the linear attention of each lesson, all its calls together."""
        calls: dict[str, list[Callable[[], object]]] = {}
        taught = [lesson for group in hybrid.letters.values() for lesson in group]

        def note(lesson: Lesson, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.setdefault(f"S {lesson.layer}", []).append(partial(lesson.present, *args, **kwargs))
            calls.setdefault(f"L {lesson.layer}", []).append(partial(layer, *args, **kwargs))

        with ExitStack() as stack, torch.inference_mode():
            for lesson in taught:
                layer = hybrid.network.get_submodule(lesson.layer)
                handle = layer.register_forward_pre_hook(partial(note, lesson), with_kwargs=True)
                stack.callback(handle.remove)
            hybrid.compute(self.inputs)
        ms = self.of({name: partial(_each, noted) for name, noted in calls.items()})
        return {lesson.layer: (ms[f"S {lesson.layer}"], ms[f"L {lesson.layer}"]) for lesson in taught}

    def of_patterns(self, hybrid: Hybrid, patterns: Sequence[str]) -> dict[str, float]:
        """Milliseconds of the whole network with each pattern."""

        def call(pattern: str) -> object:
            with hybrid.having(pattern):
                return hybrid.compute(self.inputs)

        return self.of({pattern: partial(call, pattern) for pattern in patterns})


def _each(calls: Sequence[Callable[[], object]]) -> list[object]:
    return [call() for call in calls]


def measured_plan(
    error: Callable[[str], float],
    timed: Hybrid,
    times: Times,
    about: str,
    budget: float | None,
    progress: Say,
) -> LinearizationPlan:
    """The plan from errors and times: letters in the order of error over saved time, each pattern measured.

    error: of the features with a pattern. timed: whose times are measured. about: of the plan.
    """
    progress("Measuring the error of each block")
    alone = {index: error(timed.pattern([index])) for index in timed.letters}
    progress(f"Measuring times {times.at}")
    with using_threads(times.threads):
        layers = times.of_layers(timed)
    letters = []
    for index, taught in timed.letters.items():
        softmax, linear = (sum(layers[lesson.layer][linear] for lesson in taught) for linear in (0, 1))
        letters.append(Letter(index, tuple(lesson.layer for lesson in taught), alone[index], softmax, linear))
    saving = sorted((x for x in letters if x.saved_ms > 0), key=lambda x: x.error / x.saved_ms)
    nested = [saving[:count] for count in range(len(saving) + 1)]  # no letter, the cheapest, the two cheapest …
    patterns = [timed.pattern(x.index for x in linear) for linear in nested]
    with using_threads(times.threads):
        ms = times.of_patterns(timed, patterns)
    proposals = tuple(
        Proposal(
            pattern,
            predicted_error=sum(x.error for x in linear),
            error=error(pattern),
            predicted_ms=ms[patterns[0]] - sum(x.saved_ms for x in linear),
            ms=ms[pattern],
        )
        for pattern, linear in zip(patterns, nested, strict=True)
    )
    within = [] if budget is None else [x for x in proposals if x.ms <= budget]
    return LinearizationPlan(tuple(letters), proposals, min(within, key=lambda x: x.error, default=None), about)
