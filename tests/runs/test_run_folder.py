"""One training at a time has a run's folder, and a refused one leaves nothing in it."""

import logging
import os
import subprocess
import sys
import warnings

import pytest
import torch
from images_by_class import write_classes
from tiny_run import ONE_STEP, TINY, At, write_merged, write_recipe

from linvit.data.source import fitting_workers
from linvit.files import LOCK
from linvit.runs import folder
from linvit.runs.folder import AtomicCheckpointIO, locked_folder
from linvit.runs.progress import Bar, quiet_lightning
from linvit.runs.training import train_folder

HOLDER = """
import sys, time
from pathlib import Path
from linvit.runs.folder import locked_folder
with locked_folder(Path(sys.argv[1]), resume=True):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.1)


def test_a_second_training_beside_a_running_one_is_refused(impatient, tmp_path):
    recipe = write_recipe(tmp_path, trainer=ONE_STEP)
    tried = []

    def again(trainer, task):
        before = sorted((tmp_path / "run").rglob("*"))
        for resume, sentence in ((False, "is not empty"), (True, "Another training is running in")):
            with pytest.raises(ValueError, match=sentence):
                train_folder(recipe, resume=resume)
            tried.append(resume)
        assert sorted((tmp_path / "run").rglob("*")) == before

    train_folder(recipe, callbacks=[At(0, again)])
    assert tried == [False, True]


@pytest.mark.slow
def test_a_killed_training_gives_its_folder_back(impatient, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match="Another training"), locked_folder(tmp_path / "run", resume=True):
        pass
    process.kill()
    process.wait()
    with locked_folder(tmp_path / "run", resume=True):
        assert (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(
    ("override", "there"),
    [("model.name=ravlt_nanoo", False), ("data.max_shift=40", True), ("init=nowhere.ckpt", False)],
)
def test_a_refused_start_leaves_nothing_behind(override, there, tmp_path):
    folder = tmp_path / "deep" / "run"
    if there:
        folder.mkdir(parents=True)
    recipe = write_recipe(tmp_path, trainer=ONE_STEP)
    with pytest.raises((ValueError, FileNotFoundError)):
        train_folder(recipe, [override], folder=folder)
    assert list(folder.iterdir()) == [] if there else not folder.parent.exists()


def test_a_leading_tilde_is_the_home_for_every_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run = train_folder(write_recipe(tmp_path, trainer=ONE_STEP), folder="~/x")
    assert run == tmp_path / "home" / "x"
    assert {"checkpoints", "tensorboard", "metrics.csv"} <= {path.name for path in run.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == {"home", "tiny.yaml"}


@pytest.mark.parametrize("broken", ["train", "val"])
def test_data_that_cannot_be_read_at_all_is_no_success(broken, tmp_path):
    for split in ("train", "val"):
        write_classes(tmp_path / "data" / split, {"ant": 2, "bee": 2})
    for path in (tmp_path / "data" / broken).rglob("*.png"):
        path.write_bytes(b"broken")
    data = {"name": "imagefolder", "root": str(tmp_path / "data"), "size": 32, "batch_size": 2, "max_corrupt": 99}
    values = {**TINY, "folder": str(tmp_path / "run"), "data": {**data, "num_workers": 0}}
    with pytest.raises(ValueError, match="None of the 4 samples can be used"):
        train_folder(write_merged(tmp_path / "tiny.yaml", values, {"trainer": {"max_epochs": 1}}))


def test_the_summary_stands_before_the_first_epoch(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="linvit"):
        train_folder(write_recipe(tmp_path, trainer=ONE_STEP))
    (line,) = [record.message for record in caplog.records if record.message.startswith("Training ")]
    for fact in (
        "ravlt_nano, pattern LLLL, 0.40 million parameters",
        "1,437 images to train on",
        "360 images held out",
        "10 classes",
        "32×32 px",
        "1 steps of 16 images",
        "1 × cpu, precision 32-true",
        f"folder {tmp_path / 'run'}",
    ):
        assert fact in line


def test_no_warning_that_nobody_can_act_on(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_folder(write_recipe(tmp_path, trainer=ONE_STEP, data={"num_workers": 1}))
    assert [str(warning.message) for warning in caught if "lightning" in warning.filename] == []


def test_other_warnings_of_lightning_are_shown():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet_lightning():
            warnings.warn_explicit("Checkpoint directory x exists", UserWarning, "lightning/x.py", 1, "lightning.x")
    assert len(caught) == 1


@pytest.mark.parametrize(("epochs", "shown"), [(3, "Epoch 1/3"), (None, "Epoch 1")])
def test_the_bar_counts_epochs_from_one(epochs, shown):
    class Trainer:
        max_epochs = epochs

    bar = Bar()
    bar._trainer = Trainer()
    assert bar._get_train_description(0) == shown


def test_workers_are_not_more_than_cores(caplog):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with caplog.at_level(logging.INFO, logger="linvit"):
        assert fitting_workers(1000) == cores
    assert f"Reading data with {cores} processes instead of 1000" in caplog.text
    assert fitting_workers(0) == 0


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    path = tmp_path / "last.ckpt"
    files = AtomicCheckpointIO()
    files.save_checkpoint({"step": 1}, path)

    def save_until_full(content, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save_until_full)
    with pytest.raises(OSError, match=r"could not be written \(.*No space left on device\); the one before it is"):
        files.save_checkpoint({"step": 2}, path)
    monkeypatch.undo()
    assert files.load_checkpoint(path) == {"step": 1}
    assert len(list(tmp_path.iterdir())) == 1
