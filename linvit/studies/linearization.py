"""Which blocks of a network can be linear: what replacing each costs in error and saves in time."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast

import torch
from torch import Tensor

from linvit.analysis.markdown import check_marks, marks
from linvit.bench.machine import check_device
from linvit.bench.options import Device, Threads
from linvit.errors import SettingError
from linvit.files import check_writable, user_path
from linvit.models.linearizing import Origin, lessons, letters_of
from linvit.ranges import Count, Range, check
from linvit.runs import Run
from linvit.studies.comparison import Say, silent
from linvit.studies.plan import Hybrid, LinearizationPlan, Times, measured_plan
from linvit.tasks.alignment import Alignment
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
    if folder is not None:
        check_writable(folder)  # before anything is measured
    network, place = run.placed_network()
    hybrid = Hybrid(network, task.lessons, letters_of(task.to(place).original))
    batches = [images.to(place) for images in _batches(run, images)]
    expected = [hybrid.features(hybrid.pattern(()), images) for images in batches]

    def error(pattern: str) -> float:
        pairs = zip(batches, expected, strict=True)
        errors = [relative_errors(hybrid.features(pattern, images), features) for images, features in pairs]
        return torch.cat(errors).mean().item()

    height, width = (size, size) if isinstance(size, int) else size or run.preprocessing.size
    random = torch.randn(batch, run.preprocessing.channels, height, width).to(device, DTYPES[device])
    times = Times(random, f"at {height}×{width} px, batch {batch}", device, random.dtype, threads, rounds)
    about = times.about(f"{sum(map(len, batches))} held-out images", "features")
    plan = measured_plan(error, _new_pair(cast(Origin, network.origin), random), times, about, budget, progress)
    if folder is not None:
        plan.save(folder)
    if folder is not None and page is not None:
        plan.publish(folder, page)
    plan.check_budget(budget)
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
    return Hybrid(student, lessons(student, teacher), letters_of(teacher))
