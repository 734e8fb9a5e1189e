"""The public names of linvit: what its packages offer, and what the pages mention."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
ROOMS = {
    "linvit": "Models, training, loading: what `import linvit` offers.",
    "linvit.ops": "The attention operator and its parts, as functions of tensors; needs torch alone.",
    "linvit.layers": "Attention and blocks as modules.",
    "linvit.models": "The networks, swapping and linearizing.",
    "linvit.kernels": "Kernels for GPUs and CPUs.",
    "linvit.data": "Where batches come from: the sources that recipes name by `data.name`.",
    "linvit.tasks": "Losses and measures: the tasks that recipes name by `task.name`.",
    "linvit.runs": "Training, loading, evaluating, predicting, reporting.",
    "linvit.analysis": "Ranks, scores, magnitudes, costs and figures.",
    "linvit.streaming": "Images larger than memory.",
    "linvit.parallel": "One image over many processes.",
    "linvit.deploy": "Files of other runtimes.",
    "linvit.bench": "Time, memory and errors.",
    "linvit.studies": "Comparisons of many runs.",
}
"""The packages of the reference, each with what it is for."""

DOTTED = re.compile(r"(?<![\w./])linvit(?:\.[a-z]\w*)*\.\w+")
IMPORTED = re.compile(r"^from (linvit[\w.]*) import (.+)$", re.MULTILINE)


def offered(package: str) -> list[str]:
    """The full names that a package and the packages in it offer: re-exported, in `__all__`, or defined there."""
    names = [f"{package}.{name}" for name in _offered(import_module(package))]
    names = [name for name in names if _is_code(value_of(name))]
    if package == "linvit":
        return names
    path = import_module(package).__path__
    inner = [name for _, name, is_package in pkgutil.iter_modules(path, f"{package}.") if is_package]
    return names + [name for room in inner for name in offered(room)]


def _offered(module: ModuleType) -> Iterator[str]:
    if hasattr(module, "__all__"):
        yield from module.__all__
        return
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if alias.asname == alias.name)
    for name, value in vars(module).items():
        if _is_code(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield name


def _is_code(value: object) -> bool:
    return inspect.isfunction(value) or inspect.isclass(value)


def mentioned(pages: list[Path]) -> set[str]:
    """The full names of functions and classes that the pages mention in text or import in code."""
    names: set[str] = set()
    for page in pages:
        text = page.read_text(encoding="utf-8")
        names |= set(DOTTED.findall(text))
        for module, imported in IMPORTED.findall(text):
            names |= {f"{module}.{name.strip()}" for name in imported.split("#")[0].split(",")}
    return {name for name in names if _is_code(value_of(name))}


def value_of(name: str) -> object:
    """The object with that full name, None without one; of a function and a module of one name, the function."""
    home, _, last = name.rpartition(".")
    try:
        return getattr(pkgutil.resolve_name(home), last, None)
    except (AttributeError, ImportError, ValueError):
        return None


def home_of(name: str) -> str:
    """The full name of a function or class where it is defined."""
    value = value_of(name)
    return f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]


def pages() -> list[Path]:
    """All pages that are written by hand."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def reference() -> dict[str, list[str]]:
    """The full names of the reference by package, each object once: what it offers, then what the pages mention."""
    names: dict[str, list[str]] = {package: [] for package in ROOMS}
    listed: set[int] = set()

    def add(package: str, name: str) -> None:
        value = value_of(name)
        if id(value) not in listed:
            names[package].append(name)
            listed.add(id(value))

    for package in ROOMS:
        for name in offered(package):
            add(package, name)
    for name in sorted(mentioned(pages())):
        package = ".".join(home_of(name).split(".")[:2])
        add(package if package in names else "linvit", home_of(name))
    return names


def undocumented() -> list[str]:
    """The names of the reference that have no docstring."""
    names = (name for listed in reference().values() for name in listed)
    return [name for name in names if not inspect.getdoc(value_of(name))]
