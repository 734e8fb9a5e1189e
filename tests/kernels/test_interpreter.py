"""Runs the kernel tests beside this file in Triton's interpreter, each file in a process of its own."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FILES = sorted(path.name for path in Path(__file__).parent.glob("test_kernel_*.py"))


def run_interpreted(file, *options):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
    command.append(str(Path(__file__).with_name(file)))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* passed", done.stdout), done.stdout


def test_there_are_kernel_tests():
    assert FILES


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_interpreted(file):
    run_interpreted(file)
