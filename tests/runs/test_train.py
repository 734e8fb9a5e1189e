import os
import random
import signal
import subprocess
import sys
import time

import pytest
from lightning.pytorch.callbacks import Callback
from PIL import Image
from tiny_run import content, curve, differing, write_recipe

from linvit.runs.training import train_folder
from linvit.tasks.checkpoints import RunStoppedError


class At(Callback):
    """Calls `act(trainer, task)` before the batch of one step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.act(trainer, pl_module)


def die(trainer, task):
    raise KeyError("power cut")


def press_ctrl_c(trainer, task):
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    return train_folder(write_recipe(folder))


def test_a_run_leaves_checkpoints_curve_and_recipe(straight):
    names = {str(path.relative_to(straight)) for path in straight.rglob("*") if path.is_file()}
    assert {"checkpoints/last.ckpt", "checkpoints/best.ckpt", "metrics.csv", "recipe.yaml"} <= names
    assert {"curves.png", "environment.json"} <= names
    with Image.open(straight / "curves.png") as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1_000_000)) > 10
    assert any(name.startswith("tensorboard/events") for name in names)
    assert not [name for name in names if name.endswith(".tmp")]
    rows = curve(straight)
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3, 4]
    assert {"train_loss", "val_loss", "top1", "top5", "ema_top1", "ema_top5", "lr", "images"} <= set(rows[0])
    about = content(straight)["linvit"]
    assert about["class_names"] == list("0123456789")
    assert about["recipe"]["model"]["name"] == "ravlt_nano"


def test_four_epochs_equal_two_and_two_after_a_crash(straight, tmp_path):
    recipe = write_recipe(tmp_path)
    with pytest.raises(KeyError):
        train_folder(recipe, callbacks=[At(7, die)])
    assert len(curve(tmp_path / "run")) == 2
    run = train_folder(recipe, resume=True)
    assert differing(run, straight) == []
    assert curve(run) == curve(straight)


@pytest.mark.parametrize("step", [1, 3, 5], ids=["in the first epoch", "at a start", "before a last batch"])
def test_ctrl_c_saves_and_resume_goes_on_in_the_middle_of_an_epoch(straight, tmp_path, step):
    recipe = write_recipe(tmp_path)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunStoppedError, match="`resume=True`"):
        train_folder(recipe, callbacks=[At(step, press_ctrl_c)])
    assert content(tmp_path / "run")["global_step"] == step + 1
    assert signal.getsignal(signal.SIGINT) is before
    run = train_folder(recipe, resume=True)
    assert differing(run, straight) == []
    assert curve(run) == curve(straight)


def test_a_run_that_started_from_weights_resumes_without_them(straight, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    weights = tmp_path / "weights.ckpt"
    weights.write_bytes((straight / "checkpoints" / "best.ckpt").read_bytes())
    run = train_folder(write_recipe(whole, init=str(weights), trainer={"max_epochs": 2}))
    assert differing(run, straight) != []
    recipe = write_recipe(stopped, init=str(weights), trainer={"max_epochs": 2})
    with pytest.raises(RunStoppedError):
        train_folder(recipe, callbacks=[At(3, press_ctrl_c)])
    weights.unlink()
    assert differing(train_folder(recipe, resume=True), run) == []


def test_worker_processes_change_nothing(straight, tmp_path):
    run = train_folder(write_recipe(tmp_path, data={"num_workers": 2}))
    assert differing(run, straight) == []


def test_accumulated_batches_resume_too(tmp_path):
    accumulating = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "max_epochs": 2}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir(), stopped.mkdir()
    run = train_folder(write_recipe(whole, trainer=accumulating))
    recipe = write_recipe(stopped, trainer=accumulating)
    with pytest.raises(RunStoppedError):
        train_folder(recipe, callbacks=[At(4, press_ctrl_c)])
    assert differing(train_folder(recipe, resume=True), run) == []


def test_a_finished_run_is_left_alone(straight):
    before = content(straight)["global_step"], (straight / "metrics.csv").read_text()
    train_folder(straight / "recipe.yaml", resume=True)
    assert (content(straight)["global_step"], (straight / "metrics.csv").read_text()) == before


def test_a_full_folder_is_not_overwritten(straight):
    with pytest.raises(ValueError, match="`resume=True`"):
        train_folder(straight / "recipe.yaml")


def test_another_model_does_not_go_on(straight):
    with pytest.raises(ValueError, match="'ravlt_nano', but the recipe says 'mavit_nano'"):
        train_folder(straight / "recipe.yaml", ["model.name=mavit_nano"], resume=True)


def test_a_nan_loss_stops_and_keeps_the_last_good_checkpoint(tmp_path):
    def poison(trainer, task):
        next(task.network.parameters()).data.fill_(float("nan"))

    recipe = write_recipe(tmp_path)
    with pytest.raises(FloatingPointError, match=r"The loss became nan at step 4"):
        train_folder(recipe, callbacks=[At(4, poison)])
    held = content(tmp_path / "run")
    assert held["global_step"] == 3
    assert all(value.isfinite().all() for value in held["state_dict"].values())


def test_weights_that_are_nan_are_not_saved(tmp_path):
    class Poison(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            if trainer.global_step == 6:  # the last step of epoch 2, after which no loss is taken
                next(pl_module.network.parameters()).data.fill_(float("nan"))

    with pytest.raises(FloatingPointError, match="no longer finite"):
        train_folder(write_recipe(tmp_path), callbacks=[Poison()])
    assert content(tmp_path / "run")["global_step"] == 3


def test_care_with_two_heads_trains(tmp_path):
    run = train_folder(write_recipe(tmp_path, model={"name": "care_nano"}, trainer={"max_epochs": 1}))
    assert len(curve(run)) == 1


def start(recipe, *more):
    command = [sys.executable, "-m", "linvit.cli", "train", str(recipe), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_ctrl_c_of_a_real_process(straight, tmp_path):
    recipe = write_recipe(tmp_path)
    process = start(recipe)
    for line in process.stdout:
        if line.startswith("epoch 1/4"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130, rest
    assert "train again with --resume to continue" in rest
    assert "Traceback" not in rest
    assert differing(train_folder(recipe, resume=True), straight) == []


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path):
    longer = {"max_epochs": 40, "limit_train_batches": 4}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    run = train_folder(write_recipe(whole, trainer=longer))
    recipe = write_recipe(killed, trainer=longer)
    moments = random.Random(0)
    for _ in range(10):
        process = start(recipe, "--resume")
        for line in process.stdout:
            if line.startswith("epoch"):
                break
        time.sleep(moments.uniform(0, 3))
        process.kill()
        process.wait()
    assert len(curve(killed / "run")) < 40, "killed too late to show anything"
    assert differing(train_folder(recipe, resume=True), run) == []
    assert curve(killed / "run") == curve(run)
