"""The values that a setting may have: declared in its annotation, checked before its class is constructed.

    class Source(Checked):
        def __init__(self, batch_size: Annotated[int, Range(1)], split: Annotated[str, OneOf(("train", "val"))]): ...

Integers are numbers too; booleans, NaN and infinity are not.
"""

import functools
import inspect
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import SequenceMatcher, get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

from linvit.errors import SettingError, marked, quoted

Entry = TypeVar("Entry")
Options = ParamSpec("Options")
Result = TypeVar("Result")
LISTED, NEAREST = 12, 3
HIGHEST = 2**53  # of numbers: beyond it a float no longer holds every integer
WORDS: Mapping[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    Path: ("a path", "paths"),
    dict: ("a mapping", "mappings"),
    Callable: ("a function", "functions"),
    NoneType: ("null", "null"),
    None: ("null", "null"),
}


class Rule(ABC):
    """A condition on values, the second part of an annotation `Annotated[type, rule]`."""

    @abstractmethod
    def holds(self, value: Any) -> bool:
        """Whether the condition holds for a value of the type."""

    @abstractmethod
    def words(self, noun: str, got: Any = None) -> str:
        """The allowed values in words. noun: the type in words. got: the value that is refused."""


@dataclass(frozen=True)
class Range(Rule):
    """Numbers from `least` to `most`, inclusive, or between `above` and `below`, exclusive."""

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

    def words(self, noun: str, got: Any = None) -> str:
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
class OneOf(Rule):
    """One of these names or numbers."""

    values: tuple[Any, ...]

    def holds(self, value: Any) -> bool:
        return isinstance(value, Hashable) and value in self.values  # arrays are neither

    def words(self, noun: str, got: Any = None) -> str:
        return f"one of {some_of(self.values, got)}"


@dataclass(frozen=True)
class Filled(Rule):
    """Text that is not empty."""

    def holds(self, value: Any) -> bool:
        return bool(os.fspath(value).strip())

    def words(self, noun: str, got: Any = None) -> str:
        return f"{noun} that is not empty"


@dataclass(frozen=True)
class Like(Rule):
    """Text that a regular expression matches completely. described: the expected text, in words."""

    pattern: str
    described: str

    def holds(self, value: Any) -> bool:
        return bool(re.fullmatch(self.pattern, os.fspath(value)))

    def words(self, noun: str, got: Any = None) -> str:
        return self.described


@dataclass(frozen=True)
class Some(Rule):
    """A list that is not empty."""

    def holds(self, value: Any) -> bool:
        return len(value) > 0

    def words(self, noun: str, got: Any = None) -> str:
        return f"{noun}, at least one"


@dataclass(frozen=True)
class IsA(Rule):
    """An object of this class."""

    kind: type

    def holds(self, value: Any) -> bool:
        return isinstance(value, self.kind)

    def words(self, noun: str, got: Any = None) -> str:
        return f"a {self.kind.__name__}"


Amount = Annotated[int, Range(0)]
Count = Annotated[int, Range(1)]
Share = Annotated[float, Range(0, 1)]
Seed = Annotated[int, Range(0, 2**32 - 1)]


class Checked:
    """The base of classes whose arguments are checked: ValueError, one sentence, for the first that does not fit."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        checked_class: type = cls
        positional = [p.name for p in _parameters(checked_class) if p.kind is p.POSITIONAL_OR_KEYWORD]
        check(cls, {**dict(zip(positional, args, strict=False)), **kwargs})
        return super().__new__(cls)


def arguments(of_class: type) -> dict[str, inspect.Parameter]:
    """The keyword arguments of a class, including those that it passes on to its bases as **kwargs.

    The class attribute `fixed` names the arguments of its bases that a class sets itself.
    """
    by_name: dict[str, inspect.Parameter] = {}
    fixed: set[str] = set()
    for base in of_class.__mro__[:-1]:
        if "__init__" not in vars(base):
            continue
        parameters = _parameters(base)
        for p in parameters:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in fixed:
                by_name.setdefault(p.name, p)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
        fixed |= set(vars(base).get("fixed", ()))
    return by_name


def declared(of_class: type) -> Mapping[str, Any]:
    """The annotations of a class's keyword arguments."""
    return {name: p.annotation for name, p in arguments(of_class).items()}


def completed(parameters: Mapping[str, inspect.Parameter], values: Mapping[str, Any], group: str) -> dict[str, Any]:
    """The values, and the defaults of the parameters that they leave out; SettingError for a value not allowed."""
    check({name: p.annotation for name, p in parameters.items()}, values, group)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    return {**defaults, **values}


def some_of(names: Iterable[Any], got: Any) -> str:
    """The names; of more than a dozen, only the three nearest to the given one, and their number."""
    texts = list(map(str, names))
    if len(texts) <= LISTED:
        return ", ".join(texts)
    return f"{', '.join(get_close_matches(str(got), texts, n=NEAREST, cutoff=0.0))} … ({len(texts)} in all)"


ELSEWHERE = {"learning_rate": "lr", "epochs": "max_epochs", "batch": "batch_size", "image_size": "size"}
"""What other libraries call our settings."""


def nearest(name: object, names: Iterable[str]) -> str:
    """` Did you mean …?` with the nearest name, or one in another group whose last part is near; "" if none is."""
    names = list(names)
    last_parts = {key.rpartition(".")[2]: key for key in names}
    last_part = str(name).rpartition(".")[2]
    group = str(name).removesuffix(last_part)
    ours = ELSEWHERE.get(last_part, "")
    for same in (f"{group}{ours}", last_parts.get(ours, "")):
        if same in names:
            return f" Did you mean {same!r}?"
    matches = get_close_matches(str(name), names)
    if matches:  # of equally near ones, that which begins alike: for malla mala, not mlla
        ratio = {match: SequenceMatcher(None, str(name), match).ratio() for match in matches}
        alike = {match: sum(a == b for a, b in zip(match, str(name), strict=False)) for match in matches}
        matches.sort(key=lambda match: (ratio[match], alike[match]), reverse=True)
    matches = matches or [last_parts[match] for match in get_close_matches(last_part, last_parts, n=1)]
    return f" Did you mean {matches[0]!r}?" if matches else ""


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises ValueError, offering the nearest known one, for a name that is not known."""
    allowed = sorted(allowed) if isinstance(allowed, set) else list(allowed)
    for name in names:
        if name not in allowed:
            raise ValueError(
                f"Unknown {what} {name!r}, expected one of {some_of(allowed, name)}.{nearest(name, allowed)}"
            )


def check_keys(argument: str, keys: Iterable[str], allowed: Iterable[str]) -> None:
    """Raises SettingError, offering the nearest known one, for a key of the mapping `argument` that is not known."""
    allowed = list(allowed)
    for key in keys:
        if key not in allowed:
            expected = f"expected some of {some_of(allowed, key)}.{nearest(key, allowed)}"
            raise SettingError(f"{marked(argument)} has the key {key!r}, {expected}")


def lookup(argument: str, name: Any, table: Mapping[str, Entry]) -> Entry:
    """The entry of that name; SettingError, with all names and the nearest, if there is none."""
    if not isinstance(name, str) or name not in table:
        names = ", ".join(table)
        raise SettingError(f"{marked(argument)} is {quoted(name)}, expected one of {names}.{nearest(name, table)}")
    return table[name]


def check(declaring: type | Mapping[str, Any], values: Mapping[str, Any], group: str = "") -> None:
    """Raises SettingError for the first value that its annotation does not allow; names without one are not checked.

    declaring: a class, or annotations by name. group: of a recipe, to which the names belong.
    """
    annotations = declaring if isinstance(declaring, Mapping) else declared(declaring)
    for name, value in values.items():
        annotation = annotations.get(name, Any)
        if not allows(annotation, value):
            raise SettingError.of(f"{group}.{name}" if group else name, value, expected(annotation, got=value))


def check_entries(annotations: Mapping[str, Any], entries: Mapping[str, Any]) -> None:
    """Raises ValueError for an entry that is missing, or whose value its annotation does not allow."""
    missing = [name for name in annotations if name not in entries]
    if missing:
        raise ValueError(f"the entry {missing[0]!r} is missing")
    check(annotations, entries)


def checked(verb: Callable[Options, Result]) -> Callable[Options, Result]:
    """Checks keyword-only options against their annotations first; SettingError for a value that is not allowed."""
    parameters = inspect.signature(verb).parameters.values()
    annotations = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}

    @functools.wraps(verb)
    def call(*args: Options.args, **options: Options.kwargs) -> Result:
        check(annotations, options)
        return verb(*args, **options)

    return call


def allows(annotation: Any, value: Any) -> bool:
    """Whether a value has the annotated type and is in its range; annotations unknown here allow every value."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return allows(inner[0], value) and inner[1].holds(value)
    if origin is Literal:
        return value in inner
    if origin in (Union, UnionType):
        return any(allows(alternative, value) for alternative in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _is_list(value) and len(value) == len(inner) and all(map(allows, inner, value))
    if origin in (tuple, list, Sequence):
        return _is_list(value) and all(allows(inner[0], item) for item in value)
    if annotation in (None, NoneType):
        return value is None
    if annotation is bool:
        return isinstance(value, bool)
    if annotation in (str, Path):
        return isinstance(value, str | os.PathLike)
    if Callable in (annotation, origin):
        return callable(value)
    if dict in (annotation, origin):
        return isinstance(value, Mapping) and all(allows(inner[1], item) for item in value.values() if inner)
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if annotation is float:
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        try:
            return math.isfinite(value)
        except OverflowError:  # an integer too large for a float
            return False
    return True


def expected(annotation: Any, many: bool = False, got: Any = None) -> str:
    """The allowed values in words, such as "a number above 0, or null"; of many names only those nearest to `got`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind, rule = inner
        because = f", because {rule.because}" if isinstance(rule, Range) and rule.because and not many else ""
        noun = expected(kind, many)
        return f"{rule.words(noun, got)}{because}"
    if origin is Literal:
        return OneOf(inner).words("", got)
    if origin in (Union, UnionType):
        *first, last = filter(None, (expected(kind, many, got) for kind in inner))
        return f"{', '.join(first)}, or {last}" if first else last
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)} {expected(inner[0], many=True)}"
    if origin in (tuple, list, Sequence):
        return f"a list of {expected(inner[0], many=True)}"
    kind = origin or annotation
    return WORDS.get(kind, (str(kind), str(kind)))[many]


def plain(value: Any) -> Any:
    """The value in YAML's own types: null, true, false, numbers, text, lists and mappings with text as keys.

    Tuples become lists, paths text, numbers of other libraries Python's own.
    """
    try:
        return _plain(value, "")
    except RecursionError as error:
        raise ValueError("The values are nested too deeply: write them flatter.") from error


def _plain(value: Any, key: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    if isinstance(value, Real):
        if not abs(cast(float, value)) <= HIGHEST:
            raise ValueError(f"{key} is {quoted(value)}, expected a number from -2^53 to 2^53: change it.")
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                where = f" below {key}" if key else ""
                raise ValueError(f"The recipe has the key {quoted(name)}{where}, expected text: put it in quotes.")
        return {name: _plain(item, f"{key}.{name}" if key else name) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, key) for item in value]
    raise ValueError(
        f"{key or 'The recipe'} is {quoted(value)}, a {type(value).__name__}, expected a number, text, a list or a"
        " mapping: change it."
    )


def as_tuple(value: Any) -> Any:
    """A list of numbers as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) and not any(isinstance(item, str) for item in value) else value


@functools.cache
def _parameters(of_class: type) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(of_class.__init__).parameters.values())[1:]  # type: ignore[misc]
    made = (
        {f.name: f.default_factory() for f in fields(of_class) if callable(f.default_factory)}
        if is_dataclass(of_class)
        else {}
    )
    return [p.replace(default=made[p.name]) if p.name in made else p for p in parameters]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
