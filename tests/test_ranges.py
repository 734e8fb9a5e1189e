"""Every number that a recipe can set has a range beside its declaration, and is held to it before anything starts."""

import inspect
import math
from collections.abc import Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

import numpy as np
import pytest
from lightning.pytorch import Trainer

from linvit.ranges import Checked, OneOf, Range, allows, check, declared, expected, nearest
from linvit.runs.recipe import SETTINGS, TOP, Recipe
from linvit.runs.recipe_values import merge, parsed_override
from linvit.runs.tasks import RUNS, SOURCES
from linvit.runs.trainer import PARAMETERS, RANGES

CLASSES = {
    **{run.task_class.__name__: run.task_class for run in RUNS.values()},
    **{source.__name__: source for source in SOURCES.values()},
    **{kind.__name__: kind for kind in SETTINGS.values()},
}
OURS = {name: annotation for name, annotation in RANGES.items() if annotation is not declared(Trainer).get(name)}
DECLARED = {name: declared(kind) for name, kind in CLASSES.items()} | {"Trainer": OURS, "Recipe": TOP}
NUMBERS = (int, float)
WITHOUT_RANGE: dict[str, str] = {}  # class.key: why
STEP = 1e-6


def rules(annotation):
    """(kind, range or None) of every number within an annotation."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated and inner[0] in NUMBERS:
        return [(inner[0], inner[1])]
    if annotation in NUMBERS:
        return [(annotation, None)]
    return [rule for part in inner for rule in rules(part)]


def alternatives(annotation):
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def alone(annotation):
    """Whether a single number is allowed, rather than a list of them alone."""
    kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in alternatives(annotation)]
    return any(kind in NUMBERS for kind in kinds)


KEYS = sorted((name, key) for name, keys in DECLARED.items() for key, kind in keys.items() if rules(kind))
SINGLE = [(name, key) for name, key in KEYS if alone(DECLARED[name][key])]


def at_bounds(kind, rule):
    """Values just inside a rule, and just outside it."""
    if isinstance(rule, OneOf):
        return list(rule.values), [max(rule.values) + 7]
    step = 1 if kind is int else STEP
    inside, outside = [], []
    for bound, sign, closed in (
        (rule.least, -1, True),
        (rule.above, -1, False),
        (rule.most, 1, True),
        (rule.below, 1, False),
    ):
        if bound is not None:
            inside.append(bound if closed else bound - sign * step)
            outside.append(bound + sign * step if closed else bound)
    return inside, outside


def keys_of(name, single=None):
    return [key for where, key in KEYS if where == name and (single is None or ((name, key) in SINGLE) == single)]


def test_every_number_has_a_range():
    without = {f"{name}.{key}" for name, key in KEYS if None in dict(rules(DECLARED[name][key])).values()}
    assert without == set(WITHOUT_RANGE)


@pytest.mark.parametrize("name", DECLARED)
def test_bounds(name):
    for key in keys_of(name, single=True):
        annotation = DECLARED[name][key]
        singles = [rule for part in alternatives(annotation) if alone(part) for rule in rules(part)]
        for kind, rule in singles:
            inside, outside = at_bounds(kind, rule)
            assert all(allows(annotation, value) for value in inside), key
            for value in outside:
                if not any(other.holds(value) for other_kind, other in singles if other_kind is float or kind is int):
                    assert f"`{key}` is {value}, expected " in refusal(DECLARED[name], key, value)


@pytest.mark.parametrize("name", DECLARED)
def test_what_is_no_number(name):
    for key in keys_of(name, single=True):
        kinds = alternatives(DECLARED[name][key])
        for value in (math.nan, math.inf, -math.inf, "much", True, [None], {}, None):
            if not any(kind is type(value) for kind in kinds):
                said, shown = refusal(DECLARED[name], key, value), "null" if value is None else repr(value)
                assert said.startswith(f"`{key}` is {shown}, expected ")
                assert said.endswith(": change it.")


@pytest.mark.parametrize("name", DECLARED)
def test_numbers_in_lists(name):
    for key in keys_of(name, single=False):
        annotation = DECLARED[name][key]
        numbers = rules(annotation)
        inside, outside = at_bounds(*numbers[0])
        assert allows(annotation, [inside[0]] * len(numbers))
        for value in (outside[0], math.nan, "much", None, True):
            assert f"`{key}` is [" in refusal(DECLARED[name], key, [value] * len(numbers))
        assert f"`{key}` is 3, expected a list of" in refusal(DECLARED[name], key, 3)


def refusal(annotations, key, value):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        check(annotations, {key: value})
    return str(caught.value)


def test_defaults_are_within_their_ranges():
    for kind in CLASSES.values():
        for base in kind.__mro__:
            if issubclass(base, Checked) and "__init__" in vars(base):
                parameters = inspect.signature(base.__init__).parameters.values()
                check(base, {p.name: p.default for p in parameters if isinstance(p.default, int | float | tuple)})
    check(RANGES, {name: p.default for name, p in PARAMETERS.items()})


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Range(0), "a number of 0 or more"),
        (Range(above=0), "a number above 0"),
        (Range(0, 1), "a number from 0 to 1"),
        (Range(0, below=1), "a number from 0 up to, but not including, 1"),
        (Range(above=0, most=1), "a number above 0 and up to 1"),
        (Range(above=0, below=1), "a number above 0 and below 1"),
        (OneOf((1, 3)), "one of 1, 3"),
    ],
)
def test_words(rule, words):
    assert expected(Annotated[float, rule]) == words
    assert expected(Annotated[float, rule] | None) == f"{words}, or null"


def test_words_of_lists_and_alternatives():
    side = Annotated[int, Range(32, because="it is halved")]
    assert expected(side | tuple[side, side]) == (
        "a whole number of 32 or more, because it is halved, or a list of 2 whole numbers of 32 or more"
    )
    assert expected(Sequence[Annotated[float, Range(0)]]) == "a list of numbers of 0 or more"


def test_numbers_of_numpy_and_integers_for_floats_are_numbers():
    assert allows(Annotated[float, Range(0)], 1)
    assert allows(Annotated[float, Range(0)], np.float32(0.5))
    assert allows(Annotated[int, Range(0)], np.int64(3))
    assert not allows(Annotated[int, Range(0)], 3.0)
    assert not allows(Annotated[float, Range(0)], 10**400)


class Shelf(Checked):
    def __init__(self, width: Annotated[int, Range(1)], depth: Annotated[int, Range(1)] = 1) -> None:
        self.width = width


class Cupboard(Shelf):
    def __init__(self, name: str, **options) -> None:
        super().__init__(**options)


def test_arguments_are_checked_before_the_constructor_however_they_are_given():
    assert Cupboard("c", width=2).width == 2
    for wrong in (
        lambda: Shelf(0),
        lambda: Shelf(width=0),
        lambda: Shelf(1, 0),
        lambda: Cupboard("c", width=0),
        lambda: Cupboard(3, width=1),
    ):
        with pytest.raises(ValueError, match=r"^`\w+` is \d, expected .*: change it\.$"):
            wrong()
    with pytest.raises(TypeError, match="missing"):
        Shelf()


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("task.ema_decay=2", "task.ema_decay is 2, expected a number from 0 up to, but not including, 1, or null"),
        ("optimizer.name=adamv", "optimizer.name is 'adamv', expected one of adam"),
        (
            "optimizer.options={foo: 1}",
            "optimizer.options has the key 'foo', expected some of amsgrad, betas, capturable,",
        ),
        ("schedule.min_lr=5", "schedule.min_lr is 5, above the peak learning rate of 0.002"),
        ("schedule.decay_epochs=[-1]", "schedule.decay_epochs is [-1], expected a list of numbers of 0 or more"),
        (
            "distillation.checkpoint=none.pth",
            "distillation.checkpoint is none.pth, but there is no distillation.teacher",
        ),
        ("trainer.max_epochs=true", "trainer.max_epochs is True, expected a whole number of 1 or more, or null"),
        ("data.size=null", "data.size is null, expected a whole number from 32 to 16,384, because networks halve"),
        ("seed=-1", "`seed` is -1, expected a whole number from 0 to 4,294,967,295"),
        ("init=''", "`init` is '', expected text that is not empty, or null"),
    ],
)
def test_recipes_name_the_key(override, sentence):
    key, value = parsed_override(override)
    for name in reversed(key.split(".")):
        value = {name: value}
    values = {"model": {"name": "ravlt_nano"}, "data": {"name": "digits"}, "optimizer": {"lr": 2e-3}}
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        Recipe(merge(values, value))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mean": (0.5, 0.5)}, "`mean` has 2 numbers, but `channels` is 3"),
        ({"std": (0, 0, 0)}, r"`std` is \(0, 0, 0\), expected a list of numbers from 0.001 to 1"),
        ({"auto_augment": "rand-x9"}, "`auto_augment` is 'rand-x9', expected a policy of timm, such as"),
        ({"crop_scale": (0.9, 0.1)}, "`crop_scale` is .*, expected the smaller share first"),
    ],
)
def test_images_of_a_folder_that_is_not_read(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        SOURCES["imagefolder"]("nowhere", **options)


def test_of_equally_near_names_the_one_that_begins_alike_is_offered():
    assert nearest("malla", ["mlla", "rala", "mala"]) == " Did you mean 'mala'?"
    assert nearest("xyz", ["mlla", "mala"]) == ""


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("optimizer.learning_rate", "optimizer.lr"),
        ("epochs", "trainer.max_epochs"),
        ("trainer.epochs", "trainer.max_epochs"),
        ("data.batch", "data.batch_size"),
    ],
)
def test_what_other_libraries_call_a_setting_leads_to_ours(given, ours):
    names = ["optimizer.lr", "optimizer.lr_batch", "trainer.max_epochs", "trainer.min_epochs", "data.batch_size"]
    assert nearest(given, names) == f" Did you mean {ours!r}?"
