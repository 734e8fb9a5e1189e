"""Trainings in worker processes: results, resuming, and the ledger that spares repeating them."""

import gc
import json
import multiprocessing
import threading
from concurrent.futures import wait

import pytest
from tiny_run import curve
from tiny_study import write_recipes

from linvit.data.source import Source
from linvit.environment import describe
from linvit.files import write_csv
from linvit.runs.folder import RunStoppedError, read_curves
from linvit.studies import pool
from linvit.studies.pool import Ledger, Training, complete, digest, last_measures, run_all


def training_of(recipes, folder, *overrides):
    return Training("softmax seed 0", recipes / "softmax.yaml", overrides, folder, {"overrides": list(overrides)})


def test_a_ledger_is_checked_and_knows_settings_but_not_machines(tmp_path):
    path = tmp_path / "ledger.jsonl"
    values = {
        "data": {"name": "cifar", "root": "a", "num_workers": 1, "size": 32},
        "task": {"mixup": 0.2},
        "trainer": {"accelerator": "cpu", "max_epochs": 2},
        "folder": "x",
    }
    Ledger(path).add("rala seed 0", values, {"measures": {"top1": 0.5}, "seconds": 1.0, "reason": None})
    row = json.loads(path.read_text())
    assert (row["lr"], row["clip"], row["kernel"]) == (None, None, "auto")
    more = {"optimizer": {"lr": 1e-3}, "task": {"cpp": True}, "trainer": {"gradient_clip_val": 1.0}}
    Ledger(tmp_path / "more.jsonl").add("rala seed 0", more, {"measures": {}})
    row = json.loads((tmp_path / "more.jsonl").read_text())
    assert (row["lr"], row["clip"], row["kernel"], bool(row["processor"])) == (1e-3, 1.0, "cpp", True)
    moved = {"data": values["data"] | {"root": "b", "cache": "c", "num_workers": 0}, "folder": "y"}
    moved["task"] = values["task"] | {"compile": True, "cpp": True}
    moved["trainer"] = values["trainer"] | {"accelerator": "gpu"}
    assert digest(moved) == digest(values)
    assert Ledger(path).result("rala seed 0", moved)["measures"] == {"top1": 0.5}
    assert Ledger(path).result("rala seed 1", moved) is None
    machine = describe(1, 1)
    assert Ledger(path).origins(["rala seed 0"]) == {
        "commits": [machine["commit"] or "unknown"],
        "machines": [", ".join(machine["devices"])],
        "torch": [machine["packages"]["torch"]],
    }
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(ValueError, match="line 2 is not a finished run"):
        Ledger(path)


@pytest.mark.slow  # a process that imports Lightning
def test_a_run_whose_worker_is_killed_goes_on_from_its_last_epoch(tmp_path, monkeypatch):
    recipes, run = write_recipes(tmp_path / "recipes"), tmp_path / "run"
    epochs = ("trainer.max_epochs=4", "trainer.check_val_every_n_epoch=4", "data.held_out=0.3")
    same = training_of(recipes, run, *epochs)
    monkeypatch.setattr(pool, "wait", Killing(run / "metrics.csv"))
    with pytest.raises(
        ConnectionError, match="The worker training softmax seed 0 was killed, often because it ran out of memory"
    ):
        run_all([same], 1, lambda line: None)
    begun = len((run / "metrics.csv").read_text().splitlines()) - 1
    assert 1 <= begun < 4
    assert same.result() is None
    complete(same, threading.Event())
    assert len((run / "metrics.csv").read_text().splitlines()) == 5


class Killing:
    """concurrent.futures.wait that kills the one worker as soon as its first epoch is written."""

    def __init__(self, metrics):
        self.metrics = metrics

    def __call__(self, futures, **options):
        while not self.metrics.exists() and not wait(futures, 0.02).done:
            pass
        for worker in multiprocessing.active_children():
            worker.kill()
        return wait(futures, **options)


@pytest.mark.slow
def test_a_worker_keeps_nothing_of_a_run(tmp_path):
    """A worker trains many runs; pixels of all of them would fill the memory."""
    recipes = write_recipes(tmp_path / "recipes")
    gc.collect()
    before = sum(issubclass(type(kept), Source) for kept in gc.get_objects())
    complete(training_of(recipes, tmp_path / "run"), threading.Event())
    assert sum(issubclass(type(kept), Source) for kept in gc.get_objects()) == before


def test_a_loss_that_is_no_longer_finite_is_a_result(tmp_path):
    recipes = write_recipes(tmp_path / "recipes", lr=1e12)
    result = complete(training_of(recipes, tmp_path / "run"), threading.Event())
    assert result["measures"] == {}
    assert "loss became" in result["reason"]
    assert training_of(recipes, tmp_path / "run").result() == result


def test_a_stopped_run_goes_on_from_its_last_epoch(tmp_path):
    epochs = ("trainer.max_epochs=3", "trainer.check_val_every_n_epoch=3")
    same = training_of(write_recipes(tmp_path / "recipes"), tmp_path / "run", *epochs)
    with pytest.raises(RunStoppedError):
        complete(same, StopsBeforeEpoch(3))
    before = read_curves(tmp_path / "run")
    assert len(before) == 2
    assert same.result() is None
    slow = [row | {"seconds": 1000.0} for row in before]
    write_csv(tmp_path / "run" / "metrics.csv", slow)
    result = complete(same, threading.Event())
    assert same.result() == result
    assert 2000 < result["seconds"] < 3000  # with the epochs from before
    whole = Training(same.label, same.recipe, epochs, tmp_path / "whole", same.values)
    assert result["measures"] == complete(whole, threading.Event())["measures"]
    assert curve(same.folder) == curve(whole.folder)


class StopsBeforeEpoch:
    """An event that is set when it is asked for the n-th time."""

    def __init__(self, number):
        self.left = number

    def is_set(self):
        self.left -= 1
        return self.left == 0


def test_ctrl_c_says_how_far_it_came(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "wait", Interrupted())
    recipes = write_recipes(tmp_path / "recipes", epochs=500)
    with pytest.raises(RunStoppedError, match="0 of 1 runs complete: start it again to resume"):
        run_all([training_of(recipes, tmp_path / "run")], 1, lambda line: None)
    assert not multiprocessing.active_children()
    assert not (tmp_path / "run" / "result.json").exists()


class Interrupted:
    """concurrent.futures.wait with a Ctrl-C in its first call, when the worker has begun."""

    def __init__(self):
        self.calls = 0

    def __call__(self, futures, **options):
        self.calls += 1
        if self.calls == 1:
            wait(futures, 3)
            raise KeyboardInterrupt
        return wait(futures, **options)


def test_measures_are_those_of_the_last_epoch_and_of_the_average_where_it_alone_was_measured(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,lr,ema_fid,val_loss,ema_loss,seconds\n1,1,9,9,9,9\n2,1,4,0.5,0.25,9\n")
    assert last_measures(tmp_path) == {"fid": 4, "loss": 0.5}
