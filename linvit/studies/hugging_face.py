"""Which layers of a model of transformers can be linear: what replacing each costs in error and saves in time."""

import copy
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from linvit.bench.options import Threads
from linvit.files import check_writable
from linvit.layers.operator import Lesson
from linvit.models.hugging_face import attention_layers, linear_layers, set_attention
from linvit.models.hugging_face_students import Batch, check_batch, check_pair, last_hidden_state, relative_error
from linvit.ranges import Count, Range, check
from linvit.studies.comparison import Say, silent
from linvit.studies.plan import Hybrid, LinearizationPlan, Times, measured_plan

ARGUMENTS = {"budget": Annotated[float, Range(above=0)] | None, "threads": Threads, "rounds": Count}


class TransformersHybrid(Hybrid):
    """A model of transformers in which each attention is the linear or the softmax one; inputs are its arguments."""

    def compute(self, inputs: Batch) -> object:
        return self.network(**inputs)

    def described(self, inputs: Batch) -> Tensor:
        return last_hidden_state(self.network, inputs)


def plan_for_transformers(
    student: Any,
    teacher: Any,
    batches: Collection[Batch],
    example: Batch,
    *,
    budget: float | None = None,
    threads: int = 1,
    rounds: int = 7,
    output: str | Path | None = None,
    progress: Say = silent,
) -> LinearizationPlan:
    """How replaceable the softmax attention of a model of transformers is, layer by layer, and what follows.

    Layers become linear in the order of error over saved time, and those that save no time never do. Error and time of
    a pattern are predicted as sums over its layers, and measured. Softmax layers are those of the teacher, computed as
    "sdpa" computes them.

    Args:
        student: from `linvit.linearize(teacher, …)`, aligned; both are set to evaluation mode.
        teacher: the network that it was made from.
        batches: held-out arguments of the teacher, such as dicts with pixel_values, for the errors of the last hidden
            state over the tokens that count, mean over batches.
        example: arguments of the size at which times are measured, on the device and in the dtype of the models.
        budget: milliseconds for the example; chooses the pattern of least error within it.
        threads, rounds: of the measurement of times.
        output: folder for report.html, plan.md, plan.json and the figure; None writes nothing.
        progress: called with a line before each step.

    Raises SettingError as `linvit.models.transfer`, for an example that is not a mapping of tensors, and for a budget
    that no pattern meets; the plan is written before that.
    """
    check(ARGUMENTS, {"budget": budget, "threads": threads, "rounds": rounds})
    check_pair(student, teacher, batches)
    batches = list(batches)
    for argument, batch in (("example", example), *(("batches", batch) for batch in batches)):
        check_batch(argument, batch)
    if output is not None:
        check_writable(output)  # before anything is measured
    hybrid = _hybrid(student.eval(), teacher)
    with torch.inference_mode():
        expected = [last_hidden_state(teacher.eval(), batch) for batch in batches]

    def error(pattern: str) -> float:
        pairs = zip(batches, expected, strict=True)
        errors = [relative_error(hybrid.features(pattern, batch), wanted) for batch, wanted in pairs]
        return torch.stack(errors).mean().item()

    weights = next(student.parameters())
    sizes = [f"{name} {'×'.join(map(str, x.shape))}" for name, x in example.items() if isinstance(x, Tensor)]
    # the mask of keys reads its values, which a CUDA graph cannot
    times = Times(example, f"on {', '.join(sizes)}", weights.device.type, weights.dtype, threads, rounds, graphs=False)
    held_out = f"{len(batches)} held-out batch{'es' if len(batches) > 1 else ''}"
    about = times.about(held_out, "last hidden state")
    plan = measured_plan(error, hybrid, times, about, budget, progress)
    if output is not None:
        plan.save(output)
    plan.check_budget(budget)
    return plan


def _hybrid(student: Any, teacher: Any) -> TransformersHybrid:
    """The student, whose layers can be those of a copy of its teacher that reads the same masks."""
    names, linear = {id(module): name for name, module in student.named_modules()}, linear_layers(student)
    layers = [(names[id(layer)], layer) for layer in attention_layers(student)]
    softmax = copy.deepcopy(teacher)
    set_attention(softmax, "linear", "S" * len(layers))
    pairs = zip(layers, attention_layers(softmax), strict=True)
    taught = [Lesson(name, name, present) for (name, layer), present in pairs if layer in linear]
    return TransformersHybrid(student, taught, {name: index for index, (name, _) in enumerate(layers)})
