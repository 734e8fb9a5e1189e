"""Settings by name: the arguments of a class, and how error messages spell them."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any


def parameters(kind: type) -> set[str]:
    """The names of a class's keyword arguments, with those of its bases that it passes on as **kwargs."""
    from linvit.ranges import declared  # here, so that the command line can load this module without torch

    return set(declared(kind))


def as_tuple(value: Any) -> Any:
    """A list of numbers as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) and not any(isinstance(item, str) for item in value) else value


def respelled(sentence: str, spellings: Mapping[str, str]) -> str:
    """The sentence with each `name` or `name=value` in backticks spelled as its reader writes it.

    spellings: spelling of each name, such as "data.size" or "--topk". A value follows as key=value, or as a word
    after a flag; a true or false value leaves the flag alone, as in --resume.
    """

    def replacement(match: re.Match[str]) -> str:
        spelling, value = spellings.get(match[1]), match[2]
        if spelling is None:
            return match[0]
        if value is None or (spelling.startswith("--") and value in ("True", "False")):
            return spelling
        return f"{spelling} {value}" if spelling.startswith("--") else f"{spelling}={value}"

    return re.sub(r"`(\w+)(?:=([^`\s]+))?`", replacement, sentence)


@contextlib.contextmanager
def group(group_name: str, kind: type | None, /, **others: str) -> Iterator[None]:
    """Respells the arguments of a class as keys of a group in ValueErrors raised inside: `size` becomes data.size.

    kind: the class; None to respell every name in backticks. others: names with another spelling, such as seed="seed".
    """
    try:
        yield
    except ValueError as error:
        names = re.findall(r"`(\w+)[=`]", str(error)) if kind is None else parameters(kind)
        spellings = {name: f"{group_name}.{name}" for name in names} | others
        sentence = respelled(str(error), spellings)
        if sentence == str(error):
            raise
        raise type(error)(sentence) from error
