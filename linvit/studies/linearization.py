"""Which blocks of a network can be linear: what replacing each costs in error and saves in time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from torch import Tensor, nn

from linvit.analysis.markdown import check_marks, marks
from linvit.bench.clock import Timing, clock_for, interleave, using_threads
from linvit.bench.machine import check_device, describe, sentence
from linvit.bench.rows import Device, Threads
from linvit.environment import commit
from linvit.errors import SettingError
from linvit.files import user_path
from linvit.layers.operator import Lesson
from linvit.models.linearizing import Origin, lessons, letters_of
from linvit.ranges import Count, Range, check
from linvit.runs import Run
from linvit.studies.linearization_plan import Letter, LinearizationPlan, Proposal
from linvit.studies.plan import Say, silent
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
            return cast(Tensor, getattr(network, "forward_features", network)(images))


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
        for lesson, (args, kwargs) in zip(taught, self._arguments(hybrid, taught), strict=True):
            layer = hybrid.network.get_submodule(lesson.layer)
            calls[f"S {lesson.layer}"] = partial(lesson.present, *args, **kwargs)
            calls[f"L {lesson.layer}"] = partial(layer, *args, **kwargs)
        ms = self.of(calls)
        return {lesson.layer: (ms[f"S {lesson.layer}"], ms[f"L {lesson.layer}"]) for lesson in taught}

    def of_patterns(self, hybrid: Hybrid, patterns: Sequence[str]) -> dict[str, float]:
        """Milliseconds of the whole network with each pattern."""

        def call(pattern: str) -> object:
            with hybrid.having(pattern) as network:
                return network(self.images)

        return self.of({pattern: partial(call, pattern) for pattern in patterns})

    def _arguments(self, hybrid: Hybrid, taught: Sequence[Lesson]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What the blocks pass to each attention."""
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given.append((args, kwargs))

        layers = [hybrid.network.get_submodule(lesson.layer) for lesson in taught]
        handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
        try:
            with torch.inference_mode():
                hybrid.network(self.images)
        finally:
            for handle in handles:
                handle.remove()
        return given


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

    Raises:
        ValueError: for a run of another task, a size that the network cannot take, an argument out of range, a GPU
            that is not there, and a budget that no pattern meets; the plan is written before that. For `write` without
            `output`, and a file without marks.
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
    errors = _Errors(hybrid, [batch.to(place) for batch in _batches(run, images)])
    height, width = (size, size) if isinstance(size, int) else size or run.preprocessing.size
    progress(f"Measuring times at {height}×{width} px")
    random = torch.randn(batch, run.preprocessing.channels, height, width).to(device, DTYPES[device])
    timed = _new_pair(cast(Origin, network.origin), random)
    times = Times(random, threads, rounds)
    letters, proposals = _measured(errors, timed, times)
    facts = {"images": len(errors), "height": height, "width": width, "batch": batch, "rounds": rounds}
    facts["dtype"] = str(random.dtype).removeprefix("torch.")
    about = ABOUT.format(**facts, machine=sentence({**describe(device, threads), "commit": commit()}))
    within = [] if budget is None else [x for x in proposals if x.ms <= budget]
    plan = LinearizationPlan(letters, proposals, min(within, key=lambda x: x.error, default=None), about)
    if folder is not None:
        plan.save(folder)
    if page is not None:
        plan.publish(cast(Path, folder), page)
    if budget is not None and plan.chosen is None:
        fastest = min(x.ms for x in proposals)
        raise SettingError(f"`budget` is {budget} ms, but the fastest pattern takes {fastest:.2f} ms: allow more time.")
    return plan


def _measured(errors: "_Errors", timed: Hybrid, times: Times) -> tuple[tuple[Letter, ...], tuple[Proposal, ...]]:
    """What each letter costs and saves, and the patterns that follow; `timed` has the size of the times."""
    hybrid = errors.hybrid
    alone = {place: errors.of(hybrid.pattern([place])) for place in hybrid.letters}
    with using_threads(times.threads):
        layers = times.of_layers(timed)
        letters = tuple(_letter(place, group, alone[place], layers) for place, group in hybrid.letters.items())
        patterns = [hybrid.pattern(x.index for x in linear) for linear in _nested(letters)]
        ms = times.of_patterns(timed, patterns)
    return letters, _proposals(patterns, letters, {pattern: errors.of(pattern) for pattern in patterns}, ms)


class _Errors:
    """Relative errors of the features of patterns on the same images."""

    def __init__(self, hybrid: Hybrid, batches: list[Tensor]) -> None:
        self.hybrid, self.batches = hybrid, batches
        softmax = hybrid.pattern(())
        self.expected = [hybrid.features(softmax, images) for images in batches]

    def __len__(self) -> int:
        return sum(map(len, self.batches))

    def of(self, pattern: str) -> float:
        pairs = zip(self.batches, self.expected, strict=True)
        errors = [relative_errors(self.hybrid.features(pattern, images), expected) for images, expected in pairs]
        return torch.cat(errors).mean().item()


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
    """A teacher and a student for images of that size, device and dtype, with new weights.

    Raises ValueError for a size that they cannot take.
    """
    height, width = images.shape[-2:]
    of_size = replace(origin, base={**origin.base, "img_size": (height, width)})
    try:
        try:
            teacher = of_size.teacher()
        except TypeError:  # a network for images of any size
            teacher = origin.teacher()
        teacher.eval()
        student = origin.student(teacher)
    except (AssertionError, ValueError) as error:
        raise SettingError(f"`size` is {height}×{width}, but {origin.base['name']} cannot take it: {error}.") from error
    for network in (teacher, student):
        network.to(images)
    return Hybrid(student, teacher, lessons(student, teacher))


def _letter(index: int, taught: Sequence[Lesson], error: float, ms: Mapping[str, tuple[float, float]]) -> Letter:
    names = tuple(lesson.layer for lesson in taught)
    softmax, linear = (sum(ms[name][kind] for name in names) for kind in (0, 1))
    return Letter(index, names, error, softmax, linear)


def _nested(letters: Sequence[Letter]) -> list[Sequence[Letter]]:
    """No letter, the cheapest, the two cheapest … all that save time."""
    saving = sorted((x for x in letters if x.saved_ms > 0), key=lambda x: x.error / x.saved_ms)
    return [saving[:count] for count in range(len(saving) + 1)]


def _proposals(
    patterns: Sequence[str], letters: Sequence[Letter], errors: Mapping[str, float], ms: Mapping[str, float]
) -> tuple[Proposal, ...]:
    proposals = []
    for pattern in patterns:
        linear = [x for x in letters if pattern[x.index] == "L"]
        error, saved = sum(x.error for x in linear), sum(x.saved_ms for x in linear)
        proposals.append(Proposal(pattern, error, errors[pattern], ms[patterns[0]] - saved, ms[pattern]))
    return tuple(proposals)
