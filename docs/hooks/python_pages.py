"""The pages of the Python reference: one for each package, whose docstrings mkdocstrings renders."""

from pkgutil import resolve_name
from types import ModuleType

from public import ROOMS, home_of, reference, undocumented

VERBS = ("analyze", "evaluate", "export", "predict", "prepare", "report", "source")
"""The methods of runs that the page of each task shows, also if a base of its class has them."""


def pages() -> dict[str, str]:
    """Each page as Markdown, by its path below reference/python.

    Raises ValueError if a public name has no docstring.
    """
    if missing := undocumented():
        raise ValueError(f"These public names have no docstring: {', '.join(missing)}. Write one for each.")
    names = reference()
    written = {f"{package.replace('.', '-')}.md": _page(package, names[package]) for package in ROOMS}
    rows = "\n".join(f"| [`{package}`]({package.replace('.', '-')}.md) | {about} |" for package, about in ROOMS.items())
    return written | {
        "index.md": f"# Python\n\nEvery public name, from its docstring.\n\n| package | |\n|---|---|\n{rows}\n"
    }


def _page(package: str, names: list[str]) -> str:
    return "\n".join([f"# {package}\n", f"{ROOMS[package]}\n", *map(_entry, names)])


def _entry(name: str) -> str:
    """A function that has its module's name is found where it is defined."""
    if isinstance(resolve_name(name), ModuleType):
        return f"::: {home_of(name)}\n    options: {{heading: {name}, toc_label: {name.rpartition('.')[2]}}}\n"
    if name.startswith("linvit.runs.") and name.endswith("Run"):
        return f"::: {name}\n    options: {{inherited_members: [{', '.join(VERBS)}]}}\n"
    return f"::: {name}\n"
