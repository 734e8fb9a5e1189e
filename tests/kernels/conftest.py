"""Kernel tests run on a GPU, or in Triton's interpreter, which must be chosen before Triton is imported.

So without a GPU this folder's tests are collected only in the process that test_interpreter.py starts.
"""

import os
from importlib.util import find_spec

import pytest
import torch

HERE = find_spec("triton") is not None and (os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.is_available())
collect_ignore_glob = [] if HERE else ["test_kernel_*.py"]


@pytest.fixture
def device():
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return torch.device("cpu" if interpreted else "cuda")


@pytest.fixture
def tiled(monkeypatch):
    """Tiles of so many tokens, and a machine of so many processors, so that few tokens already need several."""
    from linvit.kernels import launch

    def tile(rows, processors, at_once=0):
        settings = {width: launch.Setting(rows, 4) for width in launch.CHUNKS}
        for name in ("SETTINGS", "TF32_SETTINGS"):
            monkeypatch.setattr(launch, name, dict.fromkeys(launch.SETTINGS, settings))
        for name in ("FLOAT32", "CHUNKS", "WIDE_CHUNKS"):
            monkeypatch.setattr(launch, name, settings)
        for name in ("AT_ONCE", "AT_ONCE_ALONE"):
            monkeypatch.setattr(launch, name, at_once)
        monkeypatch.setattr(launch, "processors", lambda device: processors)

    return tile
