"""One thread a process, one seed a test; being here also lets tests import helpers such as golden_networks."""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
