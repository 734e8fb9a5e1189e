"""The folder of a kernel for the Hugging Face Hub, made from linvit's operator: kernels/linvit and what it imports.

A kernel of the Hub is a package that can be loaded from any path, twice in a process if need be. So its files import
each other by relative names, and its operators are registered under a name that depends on its content.
"""

import ast
import json
import re
import shutil
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from evidence.rows import ROOT, Call
from linvit.files import write_text

TEMPLATE = ROOT / "kernels" / "linvit"
FOLDER = ROOT / "build" / "kernels" / "linvit"
ROOT_MODULE = "linvit.ops"
BACKENDS = ("cpu", "cuda")
OPERATORS = re.compile(r'(?<=")linvit(?=::|_cpu)|(?<=torch\.ops\.)linvit(?=_cpu\b)')
"""linvit where it begins the name of an operator."""


def run(call: Call) -> None:
    """As a row of the table of evidence."""
    print(f"The kernel is in {make(FOLDER)}.")


def make(folder: Path) -> Path:
    """Writes the folder: the template, `torch-ext` with the sources, and `build` with a variant for each backend."""
    if folder.exists():
        shutil.rmtree(folder)
    shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    files = {path: path.read_text(encoding="utf-8") for path in sorted(imported(ROOT_MODULE))}
    unique = sha256("".join(files.values()).encode()).hexdigest()[:10]
    sources = folder / "torch-ext" / "linvit"
    for path, text in files.items():
        write(sources / path.relative_to(ROOT / "linvit"), movable(text, path, f"linvit_{unique}"))
    for package in {path.parent for path in sources.rglob("*.py")} - {sources}:
        (package / "__init__.py").touch()
    names = ", ".join(names_of(ROOT / "linvit" / "ops" / "__init__.py"))
    write(sources / "__init__.py", f'"""Linear attention, from linvit."""\n\nfrom .ops import {names}\n')
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        shutil.copytree(sources, variant)
        facts = {"name": "linvit", "id": f"_linvit_{backend}_{unique}", "version": 1, "license": "Apache-2.0"}
        write_text(variant / "metadata.json", json.dumps({**facts, "python-depends": [], "backend": {"type": backend}}))
    return folder


def imported(module: str) -> set[Path]:
    """The files of a module of linvit and of all that it imports, late imports too, without linvit/__init__.py."""
    files: set[Path] = set()
    modules = [module]
    for name in modules:  # grows
        path = file_of(name)
        if path is None or path in files or name == "linvit":
            continue
        files.add(path)
        for node in imports_of_linvit(ast.parse(path.read_text(encoding="utf-8"))):
            modules += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    packages = {path.parent / "__init__.py" for path in files} - {ROOT / "linvit" / "__init__.py"}
    return files | {path for path in packages if path.exists()}


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def movable(text: str, path: Path, namespace: str) -> str:
    """The text with relative imports, and operators of another namespace."""
    lines = text.splitlines(keepends=True)
    depth = len(path.relative_to(ROOT / "linvit").parts)
    for node in imports_of_linvit(ast.parse(text)):
        below = str(node.module).partition(".")[2]
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(f"from {node.module} import", f"from {'.' * depth}{below} import", 1)
    return OPERATORS.sub(namespace, "".join(lines))


def imports_of_linvit(tree: ast.Module) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "linvit":
            yield node


def names_of(path: Path) -> list[str]:
    """The names that a package gives away."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return [alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
