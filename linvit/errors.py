"""What a caller can mend, in one sentence."""

import contextlib
from collections.abc import Callable, Container, Iterator
from numbers import Real
from typing import Any

LONGEST = 60  # characters of a quoted value


class SettingError(ValueError):
    """A setting that cannot be used.

    Its sentence has the names of settings in backticks, as Python writes them: `size`, `kind=soft`. Recipes and the
    command line spell them in their own way (data.size, --size) before a user reads it.

    argument, value, expected, remedy: the parts of the sentence where `of` made it; otherwise empty.
    """

    argument = expected = remedy = ""
    value: Any = None

    @classmethod
    def of(cls, argument: str, value: Any, expected: str, remedy: str = "change it") -> "SettingError":
        """One setting with a wrong value: "`size` is 16, expected a whole number of 32 or more: change it."."""
        error = cls(f"{marked(argument)} is {quoted(value)}, expected {expected}: {remedy}.")
        error.argument, error.value, error.expected, error.remedy = argument, value, expected, remedy
        return error


def refuse(*faults: object) -> None:
    """Raises SettingError with the first of these sentences; one that does not apply is a false value in its place."""
    for fault in faults:
        if fault and isinstance(fault, str):
            raise SettingError(fault)


def spelled(sentence: str, spell: Callable[[str], str | None]) -> str:
    """The sentence with the settings that `spell` knows in its words.

    A value follows as key=value, or as a word after a flag; a true or false value leaves the flag alone.
    """
    pieces = sentence.split("`")
    if len(pieces) % 2 == 0:  # a value has a backtick
        pieces[-2:] = ["`".join(pieces[-2:])]
    for index in range(1, len(pieces) - 1, 2):
        name, equals, value = pieces[index].partition("=")
        word = spell(name) if name.isidentifier() else None
        if word is None:
            pieces[index] = f"`{pieces[index]}`"
        elif word.startswith("--"):
            pieces[index] = f"{word} {value}" if value not in ("", "True", "False") else word
        else:
            pieces[index] = f"{word}{equals}{value}"
    return "".join(pieces)


@contextlib.contextmanager
def keys_of(group: str, names: Container[str] | None = None, /, **elsewhere: str) -> Iterator[None]:
    """Spells the settings in a SettingError as keys of a recipe's group: `size` becomes data.size.

    names: of the settings in the group; None for all in the sentence. elsewhere: keys that are not in the group, by
    setting, such as seed="seed".
    """

    def key(setting: str) -> str | None:
        if setting in elsewhere:
            return elsewhere[setting]
        return f"{group}.{setting}" if names is None or setting in names else None

    try:
        yield
    except SettingError as error:
        error.args = (spelled(str(error), key),)
        raise


def marked(argument: str) -> str:
    """An argument in backticks, so that `spelled` finds it; a name with a dot is a key of a recipe already."""
    return argument if "." in argument else f"`{argument}`"


def quoted(value: Any) -> str:
    """A value as a sentence quotes it: as in YAML, and not longer than a line."""
    text = "null" if value is None else str(value) if isinstance(value, Real) else " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
