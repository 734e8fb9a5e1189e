"""Which values a setting may have: declared beside it, in its annotation, and checked before its class is constructed.

    class Source(Checked):
        def __init__(self, batch_size: Annotated[int, Range(1)], split: Annotated[str, OneOf(("train", "val"))]): ...

Integers are numbers too; booleans, NaN and infinity are not.
"""

import inspect
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

SHOWN = 60
WORDS = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    dict: ("a mapping", "mappings"),
    NoneType: ("null", "null"),
}


@dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`, these included, or between `above` and `below`, these left out."""

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    because: str = ""

    def holds(self, value: Any) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def words(self, noun: str) -> str:
        if self.above is not None:
            end = f" and up to {self.most:,}" if self.most is not None else ""
            end = f" and below {self.below:,}" if self.below is not None else end
            return f"{noun} above {self.above:,}{end}"
        if self.most is not None:
            return f"{noun} from {self.least:,} to {self.most:,}"
        if self.below is not None:
            return f"{noun} from {self.least:,} up to, but not including, {self.below:,}"
        return f"{noun} of {self.least:,} or more"


@dataclass(frozen=True)
class OneOf:
    """One of these names or numbers."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return value in self.values

    def words(self, noun: str) -> str:
        return f"one of {', '.join(map(str, self.values))}"


@dataclass(frozen=True)
class Filled:
    """Text that is not empty."""

    def holds(self, value: Any) -> bool:
        return bool(os.fspath(value).strip())

    def words(self, noun: str) -> str:
        return f"{noun} that is not empty"


Amount = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]


class Checked:
    """The base of classes whose arguments are checked: ValueError, one sentence, for the first that does not fit."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        positional = [p.name for p in _parameters(cls) if p.kind is p.POSITIONAL_OR_KEYWORD]
        check(cls, {**dict(zip(positional, args, strict=False)), **kwargs})
        return super().__new__(cls)


def declared(kind: type) -> dict[str, Any]:
    """The annotations of a class's keyword arguments, with those of its bases where it passes **kwargs on."""
    annotations: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = _parameters(base)
        for p in parameters:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                annotations.setdefault(p.name, p.annotation)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return annotations


def check(kind: type | Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError for the first value that its annotation does not allow; other names are left alone.

    kind: a class, or annotations by name.
    """
    annotations = kind if isinstance(kind, Mapping) else declared(kind)
    for name, value in values.items():
        annotation = annotations.get(name, Any)
        if not allows(annotation, value):
            raise ValueError(f"`{name}` is {_shown(value)}, expected {expected(annotation)}: change it.")


def allows(annotation: Any, value: Any) -> bool:
    """Whether a value is of the annotated kind and within its range; other annotations allow every value."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allows(inner[0], value) and inner[1].holds(value)
    if origin in (Union, UnionType):
        return any(allows(kind, value) for kind in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _is_list(value) and len(value) == len(inner) and all(map(allows, inner, value))
    if origin in (tuple, list, Sequence):
        return _is_list(value) and all(allows(inner[0], item) for item in value)
    if annotation in (None, NoneType):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation is str:
        return isinstance(value, str | os.PathLike)
    if dict in (annotation, origin):
        return isinstance(value, Mapping)
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if annotation is float:
        return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)
    return True


def expected(annotation: Any, many: bool = False) -> str:
    """What is allowed, in words: "a number above 0, or null"."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, rule = inner
        because = f", because {rule.because}" if isinstance(rule, Range) and rule.because and not many else ""
        return f"{rule.words(expected(kind, many))}{because}"
    if origin in (Union, UnionType):
        return _joined([expected(kind, many) for kind in inner], comma=True)
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} {expected(inner[0], many=True)}"
    if origin in (tuple, list, Sequence):
        return f"a list of {expected(inner[0], many=True)}"
    kind = origin or annotation
    return WORDS.get(kind, (str(kind), str(kind)))[many]


def _parameters(kind: type) -> list[inspect.Parameter]:
    return list(inspect.signature(kind.__init__).parameters.values())[1:]  # type: ignore[misc]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _joined(alternatives: Iterable[str], comma: bool = False) -> str:
    *first, last = [alternative for alternative in alternatives if alternative]
    return f"{', '.join(first)}{',' if comma else ''} or {last}" if first else last


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value) if not isinstance(value, Real) else str(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} …"
