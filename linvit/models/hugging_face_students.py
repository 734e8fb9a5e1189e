"""Linear models of transformers learn from the softmax models that they were made from, whatever they read.

`align` trains each linear layer by itself, `transfer` the whole student on the teacher's last hidden state. Batches are
mappings of the arguments of the teacher, such as pixel_values, or input_ids and attention_mask.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from linvit.arguments import check_network
from linvit.errors import SettingError, refuse
from linvit.models.hugging_face import attention_layers, linear_layers, of_transformers
from linvit.ranges import Range, check

Batch = Mapping[str, Any]
MASKS = ("attention_mask", "pixel_attention_mask")
"""Arguments that say which tokens count."""


def attention_errors(student: Any, teacher: Any, **inputs: Any) -> Tensor:
    """How far the linear attention of a model of transformers is from the softmax attention that it replaces.

    Every linear layer of the student reads what the teacher's attention there reads, so that all layers learn at once
    and none waits for another. Nothing is propagated from layer to layer, nor into the teacher.

    Args:
        student: from `linvit.linearize(teacher, …)`.
        teacher: with attn_implementation="sdpa" or another that takes masks of bool.
        inputs: arguments of the teacher, such as pixel_values, or input_ids and attention_mask.

    Returns:
        |student - teacher|² / |teacher|² of each linear layer, over the tokens that count, (layers,).
    """
    linear, errors = _learning(student), []
    pairs = zip(attention_layers(teacher), attention_layers(student), strict=True)

    def compare(learning: nn.Module, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        with torch.enable_grad():
            outputs = (x if isinstance(x, Tensor) else x[0] for x in (learning(*args, **kwargs), output))
            given, wanted = (counted(tokens, inputs) for tokens in outputs)
            errors.append(relative_error(given, wanted))

    with ExitStack() as stack, torch.no_grad():
        for layer, learning in pairs:
            if learning in linear:
                hook = layer.register_forward_hook(partial(compare, learning), with_kwargs=True)
                stack.callback(hook.remove)
        teacher(**inputs)
    return torch.stack(errors)


def align(student: Any, teacher: Any, batches: Collection[Batch], *, rate: float = 3e-3) -> list[float]:
    """Lets every linear layer of a student learn the softmax attention that it replaces, in place.

    Minimizes the mean of `attention_errors` with AdamW over the parameters of the linear layers: projections of
    queries, keys and values, and of the output where it belongs to the layer (not in BERT). The learning rate rises
    over a tenth of the batches and falls along a cosine to zero. All else stays as it is.

    Args:
        student: from `linvit.linearize(teacher, …)`.
        teacher: the network that it was made from; it is set to evaluation mode.
        batches: arguments of the teacher, one step each, such as dicts with pixel_values, or with input_ids and
            attention_mask.
        rate: the largest learning rate.

    Returns:
        The error of each step, mean over the layers.

    Raises SettingError for a student that was not made from the teacher, is frozen, or has no linear layers or weights
    in float16, and for no batches.
    """
    check_pair(student, teacher, batches)
    learned = [p for layer in _learning(student) for p in layer.parameters()]
    return _train(learned, lambda batch: attention_errors(student, teacher.eval(), **batch).mean(), batches, rate)


def transfer(student: Any, teacher: Any, batches: Collection[Batch], *, rate: float = 3e-4) -> list[float]:
    """Trains a whole student on the last hidden state of its teacher, in place.

    Minimizes |student - teacher|² / |teacher|² over the tokens that count, with the optimizer and the schedule of
    `align`. What the last hidden state does not depend on, such as a pooler, stays as it is.

    Args:
        student: from `linvit.linearize(teacher, …)`, best after `align`; it drops out what it does in its mode.
        teacher: the network that it was made from; it is set to evaluation mode.
        batches: as for `align`.
        rate: the largest learning rate.

    Returns:
        The error of each step.

    Raises SettingError as `align`, and for models whose output has no last_hidden_state.
    """
    check_pair(student, teacher, batches)

    def error(batch: Batch) -> Tensor:
        with torch.no_grad():
            wanted = last_hidden_state(teacher.eval(), batch)
        return relative_error(last_hidden_state(student, batch), wanted)

    return _train(student.parameters(), error, batches, rate)


def _train(
    learned: Iterable[nn.Parameter], error: Callable[[Batch], Tensor], batches: Collection[Batch], rate: float
) -> list[float]:
    """A step on the error of each batch; returns the errors."""
    check({"rate": Annotated[float, Range(above=0)]}, {"rate": rate})
    learned = [p for p in learned if p.requires_grad]
    refuse(
        not learned and "`student` is frozen, expected weights that can be learned: call student.requires_grad_().",
        any(p.dtype == torch.float16 for p in learned)
        and "`student` has weights in float16, whose steps are lost in rounding: train both models in float32, and"
        " convert the student then.",
    )
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=len(batches) + 1, pct_start=0.1)
    errors = []
    for batch in batches:
        check_batch("batches", batch)
        loss = error(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.clear_autocast_cache()  # of the weights before this step
        schedule.step()
        errors.append(loss.item())
    return errors


def check_pair(student: Any, teacher: Any, batches: Any) -> None:
    """Checks that the student can learn from this teacher on these batches.

    Raises TypeError if student or teacher is not a network, and SettingError if the student was not made from the
    teacher or has no linear layers, or if the number of batches is unknown or zero.
    """
    for name, model in (("student", student), ("teacher", teacher)):
        check_network(name, model)
        refuse(
            not of_transformers(model)
            and f"`{name}` is a {type(model).__name__}, expected a model of transformers: train a network of timm with"
            " the tasks alignment and transfer."
        )
    try:
        number = len(batches)
    except TypeError:  # also a DataLoader whose dataset has no length
        number = None
    widths = [
        [p.shape for layer in attention_layers(model) for p in layer.parameters()] for model in (student, teacher)
    ]
    kinds = [
        f"{type(model).__name__} with {len(attention_layers(model))} attention layers" for model in (student, teacher)
    ]
    refuse(
        kinds[0] != kinds[1]
        and f"`student` is a {kinds[0]} and `teacher` a {kinds[1]}, expected the same: make the student with"
        " linvit.linearize(teacher, …).",
        widths[0] != widths[1]
        and "`student` and `teacher` have attention of different widths, expected the same: make the student with"
        " linvit.linearize(teacher, …).",
        linear_layers(teacher)
        and "`teacher` has linear attention, expected softmax attention alone: make the student with linvit.linearize,"
        " which copies its teacher.",
        number is None
        and f"`batches` is a {type(batches).__name__}, expected a list or a DataLoader of known length: their number"
        " sets the learning rates.",
        number == 0 and "`batches` is empty, expected at least one: add some.",
    )
    _learning(student)


def check_batch(argument: str, batch: object) -> None:
    """Raises SettingError for a batch that is not a mapping with tensors."""
    refuse(
        not (isinstance(batch, Mapping) and any(isinstance(x, Tensor) for x in batch.values()))
        and f"`{argument}` has a {type(batch).__name__}, expected arguments of the models by name, such as a dict with"
        " pixel_values."
    )


def _learning(student: Any) -> list[nn.Module]:
    """The linear layers of a student; raises SettingError if there is none."""
    layers = linear_layers(student)
    refuse(not layers and "the network has kept softmax attention in all layers: set an L in its `pattern`")
    return layers


def last_hidden_state(model: Any, batch: Batch) -> Tensor:
    """The last hidden state of the tokens that count, (tokens, width) with a mask of padding, else as it is.

    Raises SettingError for a model whose output has none.
    """
    tokens = getattr(model(**batch), "last_hidden_state", None)
    if tokens is None:
        raise SettingError(
            f"the output of {type(model).__name__} has no last_hidden_state: give the models without heads, such as"
            " their `base_model`."
        )
    return counted(tokens, batch)


def counted(tokens: Tensor, batch: Batch) -> Tensor:
    """The tokens (batch, tokens, width) that count, (tokens, width), or all if there is no mask of their number."""
    masks = (batch[name] for name in MASKS if batch.get(name) is not None)
    mask = next((mask for mask in masks if mask.shape == tokens.shape[:2]), None)
    return tokens if mask is None else tokens[mask.bool()]


def relative_error(given: Tensor, wanted: Tensor) -> Tensor:
    """|given - wanted|² / |wanted|², a number in float32 at least; 0 if both are 0 everywhere."""
    dtype = torch.promote_types(wanted.dtype, torch.float32)
    given, wanted = given.to(dtype), wanted.to(dtype)
    return (given - wanted).square().sum() / wanted.square().sum().clamp_min(torch.finfo(dtype).tiny)
