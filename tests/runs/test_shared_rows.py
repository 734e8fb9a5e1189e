"""A run whose images are shared by two processes, against the same run in one process."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_run import command, content, curve, write_recipe

from linvit.runs.loading import load_run
from linvit.runs.rows import in_processes
from linvit.runs.training import train_folder

# Without LePE every layer reads one row of its neighbours at most: 64 px are enough for two processes.
TINY = {
    "model": {"name": "ravlt_nano", "drop_path_rate": 0.2, "attention": {"lepe": False}},
    # Adam would divide the gradients of biases before a batch norm, which are rounding errors, by their size.
    "optimizer": {"name": "sgd", "lr": 1e-2},
    "data": {"size": 64, "batch_size": 8},
    "trainer": {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 2, "precision": "64-true"},
}
SHARED = ["processes_per_image=2", "trainer.devices=2", "trainer.strategy=ddp"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train_folder(write_recipe(tmp_path_factory.mktemp("alone"), **TINY))


@pytest.mark.slow
def test_two_processes_that_share_rows_train_what_one_does(alone, tmp_path):
    finished = command("train", write_recipe(tmp_path, **TINY), *SHARED)
    assert finished.returncode == 0, finished.stdout
    shared = Path(tmp_path / "run")
    ours, theirs = content(alone)["state_dict"], content(shared)["state_dict"]
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if key.startswith(("network.", "ema.")):
            torch.testing.assert_close(theirs[key], value, rtol=1e-9, atol=1e-11, msg=key)
    ((expected, row),) = zip(curve(alone), curve(shared), strict=True)
    assert row["images"] == expected["images"]
    rounding = 4 * torch.finfo(torch.float32).eps  # the measures are float32 sums
    for name in expected:
        assert float(row[name]) == pytest.approx(float(expected[name]), rel=rounding), name


def test_evaluation_with_shared_rows(alone):
    run = load_run(alone)
    trainer = {"precision": "64-true", "limit_val_batches": 4}
    whole, shared = run.evaluate(trainer=trainer), run.evaluate(trainer=trainer, processes=2)
    assert shared.by_weights.keys() == whole.by_weights.keys()
    for kind, measures in whole.by_weights.items():
        assert shared.by_weights[kind] == pytest.approx(measures, rel=1e-6)


def test_refusals(alone, tmp_path):
    recipe = write_recipe(tmp_path, **TINY)
    with pytest.raises(
        ValueError, match="`processes_per_image` is 2, but the number of processes is 1: set the trainer's `devices`"
    ):
        train_folder(recipe, ["processes_per_image=2"])
    with pytest.raises(ValueError, match="which no compiler sees"):
        train_folder(recipe, ["processes_per_image=2", "task.compile=true"])


def test_prediction_with_shared_rows(alone, tmp_path):
    run = load_run(alone)
    generator = np.random.default_rng(0)
    images = [generator.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(3)]
    whole, shared = run.predict(images), run.predict(images, processes=2, output=tmp_path / "shared.csv")
    assert (tmp_path / "shared.csv").read_text().count("\n") == 4
    for ours, theirs in zip(whole, shared, strict=True):
        assert ours.classes == theirs.classes
        assert ours.probabilities == pytest.approx(theirs.probabilities, rel=1e-5)


def die(mesh, dying):
    if mesh.get_rank() in dying:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.ones(3))


@pytest.mark.parametrize("dying", [(0,), (1,), (0, 1)])
def test_a_killed_process_of_a_prediction(dying):
    with pytest.raises(ConnectionError, match="One of the 2 processes that share the images was killed"):
        in_processes(2, die, dying)


@pytest.mark.slow
def test_images_that_are_too_small_end_all_processes(tmp_path):
    finished = command("train", write_recipe(tmp_path, **TINY), *SHARED, "data.size=32")
    assert finished.returncode != 0
    said = [line for line in finished.stdout.splitlines() if line.startswith("linvit: ")]
    assert said, finished.stdout
    assert all("number of processes is 2: take fewer processes or a larger input" in line for line in said)
