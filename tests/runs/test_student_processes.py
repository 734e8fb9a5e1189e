"""Alignment and transfer over two gloo processes, against the same run in one process."""

import pytest
import torch
from test_processes import LIGHTNING, start, values
from tiny_run import content
from tiny_students import write_student_recipe

from linvit.runs.training import train_folder

ALIKE = {
    "data": {"max_shift": 0},
    "trainer": {"max_epochs": 2, "limit_val_batches": 1.0, "precision": "64-true"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("alignment", {}, id="outputs"),
        pytest.param("alignment", {"match": "maps"}, id="maps"),
        pytest.param("transfer", {}, id="features"),
        pytest.param("transfer", {"features": [0]}, id="a map"),
    ],
)
def test_two_processes_learn_what_one_learns(kind, settings, tmp_path):
    groups = {**ALIKE, "task": settings}
    finished = start(LIGHTNING, write_student_recipe(tmp_path / "two", kind, **groups))
    assert finished.returncode == 0, finished.stdout
    one = train_folder(write_student_recipe(tmp_path / "one", kind, **groups))
    two = tmp_path / "two" / "run"
    ours, theirs = content(one)["state_dict"], content(two)["state_dict"]
    for key, value in ours.items():
        if key.startswith(("network.", "original.")):
            torch.testing.assert_close(value, theirs[key], rtol=1e-8, atol=1e-10)
    columns = ("train_loss", "error", "worst", "images")
    torch.testing.assert_close(values(two, *columns), values(one, *columns), rtol=1e-6, atol=0)
