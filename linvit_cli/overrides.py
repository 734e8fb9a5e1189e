"""`data.key=value` on the command line, in the same words as in a recipe."""

import re
from collections.abc import Sequence
from typing import Any

OVERRIDE = re.compile(r"(?:--)?(data(?:\.[\w.]+)?=.*)", re.DOTALL)
NOT_OURS = ("train",)  # its overrides are any key of a recipe


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `data.key=value`, and these."""
    if arguments[:1] and arguments[0] in NOT_OURS:
        return list(arguments), []
    matches = [OVERRIDE.fullmatch(argument) for argument in arguments]
    rest = [argument for argument, match in zip(arguments, matches, strict=True) if match is None]
    return rest, [match[1] for match in matches if match]


def data_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of the data as keyword arguments: `data.root=x data.batch_size=8`, or `data=x` for a folder or name.

    Raises ValueError for a value that is not YAML.
    """
    from linvit.runs.recipe import parsed_override

    settings: dict[str, Any] = {}
    for override in overrides:
        key, value = parsed_override(override)
        if key == "data" and isinstance(value, dict):
            settings |= value
        else:
            settings[key.removeprefix("data.")] = value
    return settings


def recipe_overrides(rest: Sequence[str]) -> list[str]:
    """Both `a.b=c` and `--a.b c` or `--a.b=c`, as `a.b=c`."""
    overrides: list[str] = []
    flag = ""
    for argument in rest:
        if flag:
            overrides.append(f"{flag}={argument}")
            flag = ""
        elif argument.startswith("--") and "=" not in argument:
            flag = argument[2:]
        else:
            overrides.append(argument.removeprefix("--"))
    return [*overrides, flag] if flag else overrides
