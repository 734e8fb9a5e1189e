"""Networks by a name in a table of sizes and arguments in a recipe, with one sentence for what is unknown."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from linvit.layers.checks import check_size


def check_named(
    name: str, arguments: Mapping[str, Any], sizes: Mapping[str, Mapping[str, int]], options: Iterable[str], kind: str
) -> None:
    """Raises ValueError, offering the nearest, for a name that is not in sizes and an argument that it does not take.

    The arguments known are the sizes that the table gives, which are 1 or more, options, device and dtype; kind is the
    plural of the family.
    """
    if name not in sizes:
        near = difflib.get_close_matches(name, sizes, n=1, cutoff=0.0)
        raise ValueError(f"Unknown model {name!r}: did you mean {near[0]!r}? The {kind} are {', '.join(sizes)}.")
    known = (*sizes[name], *options, "device", "dtype")
    for key, value in arguments.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise ValueError(f"{name} has no argument {key!r}: did you mean 'model.{near[0]}'?")
        if key in sizes[name]:
            check_size(f"model.{key}", value)
