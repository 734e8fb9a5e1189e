import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from images_by_class import write_classes
from lightning.pytorch.callbacks import Callback
from PIL import Image
from tiers import quick
from tiny_run import (
    TINY,
    At,
    check_resumes_bit_for_bit,
    content,
    curve,
    differing,
    press_ctrl_c,
    write_merged,
    write_recipe,
)

import linvit
from linvit.kernels import cpu
from linvit.runs.folder import RunStoppedError
from linvit.runs.training import train_folder


def die(trainer, task):
    raise KeyError("power cut")


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


@pytest.mark.parametrize("step", quick([1, 3, 5], [3]), ids=["in the first epoch", "at a start", "before a last batch"])
def test_ctrl_c_saves_and_resume_goes_on_in_the_middle_of_an_epoch(straight, tmp_path, step):
    check_resumes_bit_for_bit(write_recipe(tmp_path), straight, step)


@pytest.mark.slow
def test_a_run_that_started_from_weights_resumes_without_them(straight, tmp_path):
    weights = shutil.copy(straight / "checkpoints" / "best.ckpt", tmp_path / "weights.ckpt")
    groups = {"init": str(weights), "trainer": {"max_epochs": 2}}
    run = train_folder(write_recipe(tmp_path / "whole", **groups))
    assert differing(run, straight) != []
    recipe = write_recipe(tmp_path / "stopped", **groups)
    with pytest.raises(RunStoppedError):
        train_folder(recipe, callbacks=[At(3, press_ctrl_c)])
    weights.unlink()
    assert differing(train_folder(recipe, resume=True), run) == []


def test_worker_processes_change_nothing(straight, tmp_path):
    run = train_folder(write_recipe(tmp_path, data={"num_workers": 2}))
    assert differing(run, straight) == []


@pytest.mark.slow
def test_accumulated_batches_resume_too(tmp_path):
    accumulating = {"accumulate_grad_batches": 2, "limit_train_batches": 5, "max_epochs": 2}
    run = train_folder(write_recipe(tmp_path / "whole", trainer=accumulating))
    recipe = write_recipe(tmp_path / "stopped", trainer=accumulating)
    with pytest.raises(RunStoppedError):
        train_folder(recipe, callbacks=[At(4, press_ctrl_c)])
    assert differing(train_folder(recipe, resume=True), run) == []


def test_a_finished_run_is_left_alone(straight):
    before = content(straight)["global_step"], (straight / "metrics.csv").read_text()
    train_folder(straight / "recipe.yaml", resume=True)
    assert (content(straight)["global_step"], (straight / "metrics.csv").read_text()) == before


def test_a_run_from_before_a_setting_goes_on_with_its_default(straight, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(straight, run)
    for name in ("last", "best"):
        held = content(run, name)
        del held["linvit"]["recipe"]["task"]["copied"], held["linvit"]["recipe"]["distillation"]["kind"]
        torch.save(held, run / "checkpoints" / f"{name}.ckpt")
    train_folder(straight / "recipe.yaml", resume=True, folder=run)
    with pytest.raises(ValueError, match=r"has task\.copied 'all', but the recipe says 'attention'"):
        train_folder(straight / "recipe.yaml", ["task.copied=attention"], resume=True, folder=run)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernels")
def test_the_kernels_of_the_cpu_train_alike_and_may_be_used_from_any_epoch_on(straight, tmp_path, monkeypatch):
    calls, kernel = [], cpu.linear_attention
    monkeypatch.setattr(cpu, "linear_attention", lambda *given, **more: calls.append(1) or kernel(*given, **more))
    recipe = write_recipe(tmp_path)
    with pytest.raises(KeyError):
        train_folder(recipe, callbacks=[At(7, die)])
    assert not calls
    try:
        run = train_folder(recipe, ["task.cpp=true"], resume=True)
    finally:
        cpu.build.cache_clear()  # other tests are of torch
    assert calls
    for found, expected in zip(curve(run), curve(straight), strict=True):
        for loss in ("train_loss", "val_loss"):
            assert float(found[loss]) == pytest.approx(float(expected[loss]), rel=1e-4)


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


def start(recipe, *more):
    command = [sys.executable, "-m", "linvit_cli", "train", str(recipe), *more]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **piped, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal_", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=["ctrl_c", "polite_kill", "closed_terminal"]
)
def test_a_signal_to_a_real_process_saves_its_run(straight, tmp_path, signal_):
    recipe = write_recipe(tmp_path, data={"num_workers": 2})
    process = start(recipe)
    for line in process.stdout:
        if line.startswith("epoch 1/4"):
            if signal_ == signal.SIGTERM:
                process.send_signal(signal_)
            else:
                os.killpg(process.pid, signal_)  # as a terminal does, to the processes that read data too
            break
    rest = process.stdout.read()
    assert process.wait(timeout=60) == 130, rest
    assert "train again with --resume to continue" in rest
    assert "Stopped and saved" in rest
    assert rest.count("Stopping after this batch") == 1
    assert "Traceback" not in rest
    assert differing(train_folder(recipe, resume=True), straight) == []


@pytest.mark.slow
def test_ten_kills_lose_nothing(tmp_path):
    longer = {"max_epochs": 40, "limit_train_batches": 4}
    run = train_folder(write_recipe(tmp_path / "whole", trainer=longer))
    killed = tmp_path / "killed"
    recipe = write_recipe(killed, trainer=longer)
    moments = random.Random(0)
    for _ in range(10):
        process = start(recipe, "--resume")
        epochs = moments.randint(1, 2)
        for line in process.stdout:
            epochs -= line.startswith("epoch")
            if not epochs:
                break
        time.sleep(moments.uniform(0, 0.4))
        process.kill()
        process.wait()
    assert len(curve(killed / "run")) < 40, "killed too late to show anything"
    assert differing(train_folder(recipe, resume=True), run) == []
    assert curve(killed / "run") == curve(run)


def test_a_run_that_fails_on_its_data_leaves_no_folder_and_the_same_call_works_afterwards(tmp_path):
    root = write_classes(tmp_path / "data", {"ant": 4, "bee": 4})
    data = {"name": "imagefolder", "root": str(root), "size": 32, "batch_size": 2, "num_workers": 0}
    recipe = write_merged(tmp_path / "tiny.yaml", {**TINY, "folder": str(tmp_path / "run"), "data": data}, {})
    file = root / "ant" / "0.png"
    whole = file.read_bytes()
    file.write_bytes(b"broken")
    with pytest.raises(ValueError, match="is not a readable image"):
        linvit.train(recipe, ["trainer.limit_train_batches=1.0"])
    assert not (tmp_path / "run").exists()
    file.write_bytes(whole)
    assert linvit.train(recipe, {"trainer.max_epochs": 1}).history
