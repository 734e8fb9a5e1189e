"""May the kernels be used: the cases of `linvit check-gpu`, the tests for GPUs, and processes that train together."""

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

from linvit.bench import gpu
from linvit.bench.exactness import Deviation
from tools.gpu.carry import ROOT
from tools.gpu.jobs import Case, Results

CODE = ("linvit/kernels", "linvit/ops")
TESTS = {
    "tests for GPUs": ("-m", "gpu", "tests/kernels/test_gpu.py", "tests/ops/test_backend.py"),
    "tests that the interpreter runs too": ("-k", "test_kernel_", "tests/kernels"),
}


def cases(toy: bool) -> list[Case]:
    shapes = ((20, 16),) if toy else gpu.SHAPES
    with patch.multiple(gpu, SHAPES=shapes, machine_obstacle=lambda *_: None):  # what cannot run says so in its row
        named = gpu.cases(torch.device("cpu" if toy else "cuda"))
    found = [Case(name, partial(exactness, name, errors), CODE, errors) for name, errors in named.items()]
    if toy:
        return [case for case in found if case.name.startswith("mala, float32")]
    found += [Case(name, partial(tests, name, arguments), CODE) for name, arguments in TESTS.items()]
    return [*found, Case("processes that train together", together, ("linvit/runs", "linvit/tasks"))]


def exactness(name: str, errors: Callable[[], list[Deviation]]) -> Results:
    check = gpu.checked(name, errors)
    worst = dict(zip(("worst of", "error", "allowed"), check.worst or (None,) * 3, strict=True))
    return {"cells": [{"case": name, **worst, "result": check.failure or "passed"}]}


def tests(name: str, arguments: tuple[str, ...]) -> Results:
    output = _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments])
    return {"cells": [{"tests": name, "result": output.strip().splitlines()[-1].strip("= ")}]}


def together() -> Results:
    """NCCL with one process, and two processes on one card with gloo, each against one process alone."""
    found = json.loads(_run([sys.executable, "tests/together.py", "gpu"]))
    names = ("NCCL, one process", "gloo, two processes on one card, SyncBatchNorm")
    table = [{"processes": name, "difference": one["difference"]} for name, one in zip(names, found, strict=True)]
    return {"cells": table, "losses": found}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError((done.stdout + done.stderr)[-450:])
    return done.stdout
