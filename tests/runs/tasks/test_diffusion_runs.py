import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from linvit.runs.draw import draw
from linvit.runs.restore import restore
from PIL import Image
from tiny_diffusion import write_diffusion_recipe
from tiny_run import content, curve, differing

from linvit.cli import main
from linvit.runs.evaluate import evaluate
from linvit.runs.training import train
from linvit.studies.pool import last_measures
from linvit.tasks.checkpoints import RunStoppedError


class PressesCtrlC(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(scope="module", autouse=True)
def _quick_judge():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawn, "EPOCHS", 1)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(write_diffusion_recipe(tmp_path_factory.mktemp("diffusion")), prints=False)


def test_it_learns_and_is_measured_by_what_its_moving_average_draws(run):
    rows = curve(run)
    losses = [float(row["train_loss"]) for row in rows]
    assert losses[-1] < losses[0] - 0.1
    distances = [float(row["ema_fid"]) for row in rows]
    best = 1 + distances.index(min(distances))
    assert content(run, "best")["global_step"] == 4 * best
    last = {key: float(value) for key, value in rows[-1].items()}
    assert last["ema_floor_fid"] < last["ema_noise_fid"]
    assert all(0 <= last[f"ema_{name}_accuracy"] <= 1 for name in ("drawn", "guided", "judge"))
    assert "fid" not in last


def test_a_stopped_run_goes_on_bit_for_bit(run, tmp_path):
    recipe = write_diffusion_recipe(tmp_path)
    with pytest.raises(RunStoppedError):
        train(recipe, callbacks=[PressesCtrlC()], prints=False)
    assert content(tmp_path / "run")["global_step"] == 7
    train(recipe, resume=True, prints=False)
    assert differing(tmp_path / "run", run, fewest=20) == []
    assert curve(tmp_path / "run") == curve(run)


@pytest.mark.slow
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    alone = tmp_path / "alone"
    alone.mkdir()
    train(write_diffusion_recipe(alone, task={"generates": False}), prints=False)
    killer = {"class_path": "tiny_run.Dies", "init_args": {"step": 6}}
    recipe = write_diffusion_recipe(tmp_path, task={"generates": False}, trainer={"callbacks": [killer]})
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, "-m", "linvit.cli", "train", str(recipe)]
    dead = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)}, timeout=300)
    assert dead.returncode == -signal.SIGKILL
    train(write_diffusion_recipe(tmp_path, task={"generates": False}), resume=True, prints=False)
    assert differing(tmp_path / "run", alone / "run", fewest=20) == []


def test_eval_measures_what_the_last_epoch_did_and_keeps_its_judge(run, monkeypatch):
    monkeypatch.setattr(drawn, "EPOCHS", 0)  # an untrained judge would give other figures
    measured = evaluate(restore(run / "checkpoints" / "last.ckpt"), enable_progress_bar=False)
    last = curve(run)[-1]
    for name, value in measured["ema"].items():
        if name != "images":
            assert value == pytest.approx(float(last[f"ema_{name}"]), rel=1e-4, abs=1e-6), name
    assert set(measured["raw"]) == {"loss", "images"}
    assert measured["raw"]["images"] == 36


def test_the_tables_of_eval_have_a_place_for_every_measure(run, capsys):
    assert main(["eval", str(run), "--json"]) == 0
    assert '"guided_fid"' in capsys.readouterr().out
    assert main(["eval", str(run)]) == 0
    assert "FID-like" in capsys.readouterr().out


def test_generate_draws_a_row_a_class_and_the_same_one_again(run, tmp_path, capsys):
    asked = ["generate", str(run), "--classes", "3", "5", "--count", "4", "--steps", "3", "--guidance", "2"]
    for name in ("one.png", "two.png"):
        assert main([*asked, "--output", str(tmp_path / name)]) == 0
    assert main([*asked, "--seed", "1", "--output", str(tmp_path / "other.png")]) == 0
    assert "holds 8 images" in capsys.readouterr().out
    one, two, other = (np.asarray(Image.open(tmp_path / f"{name}.png")) for name in ("one", "two", "other"))
    assert one.shape == (2 * 50 + 2, 4 * 50 + 2, 3)
    assert (one == two).all()
    assert (one != other).any()


def test_all_images_in_one_file_are_as_evaluation_suites_read_them(run, tmp_path):
    draw(restore(run), tmp_path / "all.npz", count=2, steps=3, sampler="ddpm")
    held = np.load(tmp_path / "all.npz")
    assert held["arr_0"].shape == (20, 8, 8, 3)
    assert held["arr_0"].dtype == np.uint8
    assert held["labels"].tolist() == [label for label in range(10) for _ in range(2)]


def test_the_page_of_a_generator_shows_what_it_draws(run, tmp_path):
    page = tmp_path / "page.html"
    assert main(["eval", str(run), "--report", str(page)]) == 0
    assert "What it draws" in page.read_text()


def test_a_comparison_reads_the_measure_of_the_network_that_draws(run):
    assert last_measures(run)["fid"] == float(curve(run)[-1]["ema_fid"])
    assert last_measures(run)["train_loss"] == float(curve(run)[-1]["train_loss"])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["generate", "RUN"], "say where they go with --output"),
        (["generate", "RUN", "--output", "a.jpg"], "neither a .png nor a .npz"),
        (["generate", "RUN", "--output", "a.png", "--classes", "ten"], "'ten' is unknown: name one of 0, 1"),
        (["generate", "RUN", "--output", "a.png", "--steps", "1"], "expected 2 to 1000"),
        (["generate", "RUN", "--output", "a.png", "--count", "0"], "--count is 0"),
        (["generate", "RUN", "--output", "a.png", "--guidance", "-1"], "--guidance is -1"),
        (["generate", "RUN", "--output", "a.png", "--guidance", "nan"], "--guidance is nan"),
        (["generate", "RUN", "--output", "a.png", "--seed", "-1"], "--seed is -1"),
        (["generate", "RUN", "--output", "a.png", "--vae", "vae"], "this run draws pixels, not latents"),
        (["generate", "RUN", "--output", "a_file/a.png"], "The folder a_file cannot be written"),
        (["generate", "RUN", "--output", "folder.png"], "folder.png is a folder"),
        (["predict", "RUN", "a.png"], "it names none: `linvit generate RUN"),
        (["eval", "RUN", "--data", "digits"], "leave it out"),
    ],
)
def test_what_cannot_be_drawn_is_one_sentence(run, asked, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").touch()
    (tmp_path / "folder.png").mkdir()
    assert main([str(run) if part == "RUN" else part for part in asked]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ({"model": {"mechanism": "mla"}}, "expected one of softmax, linear, mala, rala"),
        ({"model": {"name": "dit_smal_patch2"}}, "did you mean 'dit_small_patch2'"),
        ({"model": {"widht": 3}}, r"did you mean 'model\.width'"),
        ({"task": {"sampler": "euler"}}, "expected one of ddim, ddpm"),
        ({"task": {"class_dropout": 1.5}}, "expected a share"),
        ({"model": {"mlp_ratio": "four"}}, "An argument of dit_nano_patch2 is of the wrong kind"),
        ({"data": {"size": 0}}, "size` is 0"),
        ({"data": {"size": 16}}, "this DiT reads 1×8×8: set its channels and input_size to the data's"),
    ],
)
def test_a_recipe_that_cannot_be_trained_is_one_sentence(groups, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        train(write_diffusion_recipe(tmp_path, **groups), prints=False)


def test_without_drawing_the_loss_chooses(tmp_path):
    run = train(write_diffusion_recipe(tmp_path, task={"generates": False}, model={"learn_sigma": True}), prints=False)
    assert all(math.isfinite(float(row["ema_loss"])) for row in curve(run))
    assert "ema_fid" not in curve(run)[0]
    measured = evaluate(restore(run / "checkpoints" / "last.ckpt"), enable_progress_bar=False)
    assert measured["ema"]["loss"] == pytest.approx(float(curve(run)[-1]["ema_loss"]), rel=1e-5)
    shutil.rmtree(run)


def test_a_damaged_judge_is_named(run, tmp_path, capsys):
    folder = shutil.copytree(run, tmp_path / "copy")
    (folder / drawn.JUDGE).write_bytes(b"damaged")
    assert main(["eval", str(folder)]) == 2
    assert "judge.safetensors is damaged or belongs to other data: delete the file" in capsys.readouterr().err


def test_a_network_that_draws_no_numbers_says_so(run, tmp_path):
    restored = restore(run)
    for network in restored.task.networks().values():
        torch.nn.init.constant_(network.head.bias, math.nan)
    with pytest.raises(ValueError, match="draws no finite numbers here"):
        draw(restored, tmp_path / "a.png", ["3"], 1, steps=2)


def test_what_a_network_without_finite_numbers_draws_has_no_distance(run):
    restored = restore(run)
    for network in restored.task.networks().values():
        torch.nn.init.constant_(network.head.bias, math.nan)
    measured = evaluate(restored, enable_progress_bar=False)["ema"]
    assert math.isnan(measured["fid"])
    assert math.isfinite(measured["floor_fid"])
