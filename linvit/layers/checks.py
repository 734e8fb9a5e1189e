"""What the arguments of a layer can be; each raises ValueError for what it cannot."""

from collections.abc import Mapping
from typing import Any


def known(argument: str, name: str, table: Mapping[str, Any]) -> Any:
    """The entry of that name."""
    if name not in table:
        raise ValueError(f"`{argument}` is {name!r}, expected one of {', '.join(table)}: choose a known one")
    return table[name]


def check_size(argument: str, size: object, least: int = 1) -> None:
    """A whole number of `least` or more."""
    if not isinstance(size, int) or size < least:
        raise ValueError(f"`{argument}` is {size!r}, expected a whole number of {least} or more: change it")
