"""The values of a recipe that may leave the machine, in a model card or on a server: none of them is a path."""

import re
from collections.abc import Mapping
from typing import Any

PRIVATE = {"folder", "root", "val_root", "class_map", "default_root_dir", "logger"}
WEIGHTS = {"init", "checkpoint", "checkpoint_path"}
"""Keys with files of weights, whose names say where a training started from."""
PATH = re.compile(r"(^|[\s=,;'\"])(/|\\|~|\$|\.\.?[/\\]|[A-Za-z]:[/\\]|file:)")


def publishable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that are or contain paths; of a file of weights the name remains."""
    kept = {}
    for key, value in values.items():
        if key in WEIGHTS and isinstance(value, str):
            kept[key] = re.split(r"[/\\]", value.rstrip("/\\"))[-1]
        elif key not in PRIVATE and not _is_path(value):
            kept[key] = _inside(value)
    return kept


def _inside(value: Any) -> Any:
    if isinstance(value, Mapping):
        return publishable(value)
    if isinstance(value, list | tuple):
        return [_inside(item) for item in value if not _is_path(item)]
    return value


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and PATH.search(value) is not None
