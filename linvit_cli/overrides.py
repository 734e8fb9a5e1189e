"""`data.key=value` on the command line, spelled as in a recipe."""

import re
from collections.abc import Sequence
from typing import Any

OVERRIDE = re.compile(r"(?:--)?(data(?:\.[\w.]+)?=.*)", re.DOTALL)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments without `data.key=value`, and those overrides; everything after -- is an argument."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest, overrides = [], []
    for argument in arguments[:end]:
        match = OVERRIDE.fullmatch(argument)
        if match:
            overrides.append(match[1])
        else:
            rest.append(argument)
    return [*rest, *arguments[end:]], overrides


def data_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of the data as keyword arguments: `data.root=x data.batch_size=8`, or `data=x` for a folder or name.

    Raises ValueError for a value that is not YAML, and for a setting that is given twice.
    """
    from linvit.runs.recipe import parsed_override

    settings: dict[str, Any] = {}
    for override in overrides:
        key, value = parsed_override(override)
        given = value if key == "data" and isinstance(value, dict) else {key.removeprefix("data."): value}
        twice = next((name for name in given if name in settings), None)
        if twice is not None:
            raise ValueError(f"data.{twice.removeprefix('data.')} is given twice, expected once: leave one out.")
        settings |= given
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
