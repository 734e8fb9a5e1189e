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

    def tile(rows, processors):
        for name in ("BLOCKS", "BACKWARD_BLOCKS", "CHUNKS", "WIDE_CHUNKS"):
            blocks = {width: (rows, warps) for width, (_, warps) in getattr(launch, name).items()}
            monkeypatch.setattr(launch, name, blocks)
        monkeypatch.setattr(launch, "_processors", lambda device: processors)

    return tile
