"""One thread a process, one seed a test; being here also lets tests import helpers such as golden_networks."""

import gc
import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # processes that tests start round as this one does


def pytest_collection_finish():
    """What collecting has imported stays: the garbage collector, which took a sixth of the time, need not visit it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()  # or libraries report at the exit that their objects are still there


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
