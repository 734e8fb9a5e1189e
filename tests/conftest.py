"""One thread a process, one seed a test; being here also lets tests import helpers such as golden_networks."""

import os

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # processes that tests start round as this one does


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
