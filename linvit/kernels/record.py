"""Whether the Triton kernels have passed their check on a GPU: `linvit check-gpu` writes a user's record.

It holds for a kind of GPU, versions of torch and Triton, and kernels. A copy of the file in `records` ships with linvit
and holds for all GPUs of a compute capability, which with Triton's version and the kernels decides the machine code.
"""

import ast
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from linvit.formulas import named_formula
from linvit.formulas.triton_source import triton_source
from linvit.kernels.support import FEATURE_MAPS, NORMALIZERS, machine_obstacle

FOLDER = "LINVIT_RECORDS"
SHIPPED = Path(__file__).parent / "records"
SHIPPED_FOR = ("capability", "triton")
OWN_FOR = ("gpu", "torch", *SHIPPED_FOR)
CALLS = {  # the functions that start the kernels, and the code that is traced from names
    "bidirectional": ("forward", "backward", "formulas"),
    "causal": ("causal_forward", "causal_backward", "formulas"),
    "softmax": ("softmax_forward", "softmax_backward"),
    "depthwise": ("depthwise_forward", "depthwise_backward"),
    "product": ("product_forward",),
}
_warn_once = cache(logging.getLogger(__name__).warning)
_decided: bool | None = None


@contextmanager
def trusted(decision: bool) -> Iterator[None]:
    """A context in which backend="auto" uses the Triton kernels, or not, whatever the records say: for comparisons."""
    global _decided
    before, _decided = _decided, decision
    try:
        yield
    finally:
        _decided = before


@torch.compiler.assume_constant_result
def passed(device: torch.device, calls: str) -> bool:
    """Whether the kernels of these calls, a key of CALLS, have passed on this GPU."""
    return _passed(device.index or 0, calls) if _decided is None else _decided


@cache
def _passed(index: int, calls: str) -> bool:
    if machine_obstacle(torch.device("cuda", index)) is not None:
        return False
    try:
        now = about(index)
    except PackageNotFoundError:
        return False
    verdict = _verdict(path(now), now, (*OWN_FOR, *CALLS[calls]))
    if verdict is None:
        verdict = any(_verdict(file, now, (*SHIPPED_FOR, *CALLS[calls])) for file in SHIPPED.glob("*.json"))
        if not verdict:
            _warn_once("The Triton kernels are off on %s: `linvit check-gpu` turns them on if they pass.", now["gpu"])
    return verdict


def _verdict(file: Path, now: Mapping[str, str], facts: Iterable[str]) -> bool | None:
    """What a record says; None if it is damaged, or holds for other facts than now."""
    try:
        record = json.loads(file.read_text())
        holds = all(record["about"][name] == now[name] for name in facts)
        return record["passed"] is True if holds else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def forget() -> None:
    """Reads the records again."""
    _passed.cache_clear()


def about(index: int = 0) -> dict[str, str]:
    """What a record holds for: GPU, its compute capability, versions, and `digests` of the kernels."""
    major, minor = torch.cuda.get_device_capability(index)
    return {
        "gpu": torch.cuda.get_device_name(index),
        "capability": f"{major}.{minor}",
        "torch": str(torch.__version__),
        "triton": version("triton"),
        **digests(),
        "formulas": digest_of_formulas(),
    }


@cache
def digests(folder: Path = SHIPPED.parent) -> dict[str, str]:
    """SHA-256 of each function of CALLS and all that it uses from the folder, in whatever file that is written."""
    defined: dict[str, list[ast.AST]] = {}
    for node in (node for file in folder.glob("*.py") for node in ast.parse(file.read_bytes()).body):
        for name in {node.name} if isinstance(node, ast.FunctionDef | ast.ClassDef) else _names(node, ast.Store):
            defined.setdefault(name, []).append(node)
    by_call = {}
    for call in sorted({*chain(*CALLS.values())} - {"formulas"}):
        names = [call]
        for name in names:  # grows by what they use
            names += {used for x in defined.get(name, ()) for used in _names(x, ast.Load)}.difference(names)
        by_call[call] = _digest(node for name in names for node in defined.get(name, ()))
    return by_call


@cache
def digest_of_formulas() -> str:
    """SHA-256 of the device code of feature maps and normalizers that have names."""
    names = [*((name, True) for name in FEATURE_MAPS), *((name, False) for name in NORMALIZERS)]
    return sha256("".join(triton_source(named_formula(*name)) for name in names).encode()).hexdigest()


def digest_of_files(paths: Iterable[str | Path]) -> str:
    """SHA-256 of Python code without comments, docstrings, layout and names of files; the same in every Python."""
    return _digest(ast.parse(Path(path).read_bytes()) for path in paths)


def _names(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name) and isinstance(x.ctx, context)}


def _digest(nodes: Iterable[ast.AST]) -> str:
    return sha256("\n".join(sorted(map(_plain, nodes))).encode()).hexdigest()


def _plain(node: Any) -> str:
    """A syntax tree as text, without empty fields, whose number depends on Python's version, and lone strings."""
    if isinstance(node, ast.JoinedStr):  # a nested format has an empty last piece in Python 3.12
        node.values = [x for x in node.values if getattr(x, "value", None) != ""]
    if isinstance(node, ast.AST):
        fields = [f"{name}={_plain(x)}" for name, x in ast.iter_fields(node) if x is not None and x != []]
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        code = [x for x in node if not (isinstance(x, ast.Expr) and isinstance(getattr(x.value, "value", None), str))]
        return f"[{', '.join(map(_plain, code))}]"
    return ascii(node)


def path(about: Mapping[str, str]) -> Path:
    """The file of a record, in the user's cache or the folder named by the environment variable LINVIT_RECORDS."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(FOLDER) or home / "linvit" / "gpus")
    name = re.sub(r"[^\w.-]+", "-", about["gpu"])
    key = sha256(json.dumps([about[fact] for fact in OWN_FOR]).encode()).hexdigest()
    return folder / f"{name}-{key[:12]}.json"
