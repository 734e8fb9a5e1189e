"""Runs the kernel tests beside this file in Triton's interpreter, in a process of their own."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = sorted(map(str, Path(__file__).parent.glob("test_kernel_*.py")))
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def run_interpreted(*options):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    done = subprocess.run([*command, *FILES], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])


def test_kernels_in_the_interpreter():
    assert run_interpreted() >= 30


@pytest.mark.slow
def test_more_kernels_in_the_interpreter():
    assert run_interpreted("-m", "slow") >= 50
