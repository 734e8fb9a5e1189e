"""The values of a recipe: YAML without tags and with unique text keys, over those of its `base`, under overrides.

Also which of them may leave the machine.
"""

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from linvit.bundled import find_recipe
from linvit.data.disk import read_text
from linvit.errors import SettingError, quoted
from linvit.files import explained

LARGEST = 2**20  # bytes
DEEPEST = 16  # keys of keys in an override
STANDARD = "tag:yaml.org,2002:"
TEXT, MERGE = f"{STANDARD}str", f"{STANDARD}merge"
HASH = "\ue000"  # replaces # in an override, where # does not begin a comment
Overrides = Mapping[str, Any] | Sequence[str]


def read_recipe(path: str | Path, overrides: Overrides = ()) -> dict[str, Any]:
    """The values of a recipe, merged over those of its `base` file and under the overrides.

    path: a file, or the name of a bundled recipe. overrides: `key.key=value` strings, or a mapping from dotted keys to
    values. A base may have a base in turn, each path relative to the file that names it.
    """
    changes = overrides.items() if isinstance(overrides, Mapping) else list(map(parsed_override, overrides))
    path = find_recipe(path)
    values = _with_base(path, [])
    for key, value in changes:
        if not isinstance(key, str) or key.count(".") > DEEPEST:
            raise ValueError(f"The override {quoted(key)} names no key: write one such as trainer.max_epochs.")
        for name in reversed(key.split(".")):
            value = {name: value}
        values = merge(values, value)
    values.setdefault("folder", str(Path("runs") / path.stem))
    return values


def _with_base(path: Path, above: Sequence[Path]) -> dict[str, Any]:
    """The values of a file over those of its bases. above: the files that build on it."""
    if path.resolve() in above:
        raise SettingError(f"{above[0]} comes back to {path.name} through its bases: remove `base` from one of them.")
    values = read_yaml(path)
    base = base_of(path, values)
    values.pop("base", None)
    return values if base is None else merge(_with_base(base, [*above, path.resolve()]), values)


def base_of(path: Path, values: Mapping[str, Any] | None = None) -> Path | None:
    """The file that a recipe builds on, None if it names none. values: those of the file, if it has been read."""
    base = (read_yaml(path) if values is None else values).get("base")
    if base is not None and not isinstance(base, str):
        raise SettingError(
            f"The `base` of the recipe {path} is {quoted(base)}, expected the path of a recipe: correct it."
        )
    return None if base is None else Path(os.path.normpath(path.parent / base))


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A new nested dictionary: above's values win, key by key; under another `name` a group keeps its other keys."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return merged


def overrides(values: Mapping[str, Any], key: str = "") -> list[str]:
    """Nested values as `key.key=value` strings, the inverse of `parsed_override`."""
    if isinstance(values, Mapping) and (values or not key):
        return [line for name, value in values.items() for line in overrides(value, f"{key}.{name}" if key else name)]
    return [f"{key}={json.dumps(values)}"]


def parsed_override(override: str) -> tuple[str, Any]:
    """`trainer.max_epochs=3` → ("trainer.max_epochs", 3); raises ValueError for any other form."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ValueError(f"The override {override!r} has no value: write key=value, trainer.max_epochs=3 for example.")
    with explained(
        lambda reason: f"The value of the override {quoted(override)} is not valid YAML ({reason}): correct it.",
        ValueError,
    ):
        return key, _with_hashes(load_yaml(text.replace("#", HASH)))  # no # begins a comment


def read_yaml(path: Path) -> dict[str, Any]:
    """The `key: value` pairs of a recipe; raises ValueError, one sentence, for any other file."""
    if not path.is_file():
        raise SettingError(f"There is no recipe at {path}: give the path of a .yaml file.")
    if path.stat().st_size > LARGEST:
        raise SettingError(f"The recipe {path} is larger than {LARGEST // 2**10:,} KiB: give a smaller file.")
    text = read_text(path)
    with explained(lambda reason: f"The recipe {path} is not valid YAML ({reason}): correct it.", ValueError):
        values = load_yaml(text)
    if not isinstance(values, dict):
        raise ValueError(f"The recipe {path} contains no `key: value` pairs: `linvit recipes` lists examples.")
    return values


def load_yaml(text: str) -> Any:
    """The value of a YAML text; raises ValueError, with line and column, for YAML that is broken or not allowed."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{' '.join(str(error.problem or error.context).split())}") from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        digits = isinstance(error, ValueError)  # of an integer of thousands of digits
        reason = "values are nested too deeply" if deep else "a number has too many digits" if digits else str(error)
        raise ValueError(" ".join(reason.split())) from error


def dump_yaml(values: Mapping[str, Any]) -> str:
    """The YAML that `load_yaml` reads as these values, keys in their order."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def _with_hashes(value: Any) -> Any:
    if isinstance(value, dict):
        return {_with_hashes(key): _with_hashes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_hashes(item) for item in value]
    return value.replace(HASH, "#") if isinstance(value, str) else value


class _Loader(yaml.SafeLoader):
    """1e-3 is a number as in Python, dates and 12:30 are text; no alias refers to a value with an alias in it."""

    yaml_implicit_resolvers = copy.deepcopy(yaml.SafeLoader.yaml_implicit_resolvers)

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._aliases = 0
        self._without_alias: set[yaml.Node] = set()

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, aliases = self.peek_event(), self._aliases
        if getattr(event, "tag", None) not in (None, "!", TEXT):
            raise self._error(f"the tag {event.tag.replace(STANDARD, '!!')} is not supported, leave it out", event)
        node: yaml.Node = super().compose_node(parent, index)
        if isinstance(event, yaml.AliasEvent):
            if node not in self._without_alias:  # it would contain itself, or grow with every alias
                raise self._error(f"*{event.anchor} refers to a value with an alias in it: write it out", event)
            self._aliases += 1
        elif self._aliases == aliases:
            self._without_alias.add(node)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            problem = None
            if not isinstance(key, yaml.ScalarNode):
                problem = "a key is a list or a mapping, expected text"
            elif key.tag not in (TEXT, MERGE):
                problem = f"the key {key.value} is not text, put it in quotes"
            elif key.tag == TEXT and key.value in seen:
                problem = f"the key {key.value} is given twice"
            if problem is not None:
                raise self._error(problem, key)
            seen.add(key.value)
        return node

    @staticmethod
    def _error(problem: str, at: yaml.Node | yaml.Event) -> yaml.MarkedYAMLError:
        return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that the loader would read as numbers, such as 1e-3."""

    yaml_implicit_resolvers = copy.deepcopy(yaml.SafeDumper.yaml_implicit_resolvers)


for _first, _rules in _Loader.yaml_implicit_resolvers.items():
    _Loader.yaml_implicit_resolvers[_first] = [
        (tag, pattern)
        for tag, pattern in _rules
        if tag.removeprefix(STANDARD) not in ("timestamp", "int", "float", "value")
    ]
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+|0o?[0-7]+)$")
_NUMBER = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d+([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))$|\.(nan|NaN|NAN)$"
)
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(f"{STANDARD}int", _INTEGER, list("-+0123456789"))
    _kind.add_implicit_resolver(f"{STANDARD}float", _NUMBER, list("-+0123456789."))


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
