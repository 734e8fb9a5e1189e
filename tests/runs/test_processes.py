"""A run over two gloo processes, started as a user starts it, against the same run in one process."""

import csv
import json
import sys

import pytest
import together
import torch
from tiny_language import write_language_recipe
from tiny_run import LINVIT, command, content, curve, differing, write_recipe
from tiny_speech import write_speech_recipe
from tiny_students import write_student_recipe

from linvit.runs import load_run
from linvit.runs.training import train_folder

EPOCHS = 3
# Without batch norm (SyncBatchNorm needs CUDA), drop path and mixing (drawn for each process) both see the same images.
ALIKE = {
    "model": {"name": "test_vit", "img_size": 32, "drop_path_rate": 0.0},
    "task": {"mixup": 0.0, "cutmix": 0.0},
    "trainer": {"max_epochs": EPOCHS, "limit_val_batches": 1.0},
}
PRECISE = "trainer.precision=64-true"
SINGLE = {"one": [], "exact": [PRECISE]}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "linvit_cli"]
TWO = ["data.batch_size=8", "trainer.devices=2", "trainer.strategy=ddp"]


def two_and_one(folder, write, *overrides, of_two=TWO, launcher=LINVIT, **groups):
    """The folders of a run in two processes and of the same in one."""
    finished = command("train", write(folder / "two", **groups), *of_two, *overrides, launcher=launcher)
    assert finished.returncode == 0, finished.stdout
    return folder / "two" / "run", train_folder(write(folder / "one", **groups), overrides)


def largest_difference(run, other):
    """Of a weight of the network."""
    ours, theirs = (content(folder)["state_dict"] for folder in (run, other))
    names = [name for name in theirs if name.startswith("network.")]
    assert all(type(ours[name]) is torch.Tensor for name in names)
    assert len(names) > 15
    return max((ours[name] - theirs[name]).abs().max() for name in names)


def dying(rank):
    """An override that kills one process in the middle of the second epoch."""
    return f"trainer.callbacks=[{{class_path: tiny_run.Dies, init_args: {{step: 4, rank: {rank}}}}}]"


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    finished = command("train", write_recipe(folder, **ALIKE), *TWO)
    assert finished.returncode == 0, finished.stdout
    assert finished.stdout.count("epoch 2/") == 1, "every process prints"
    return folder / "run"


def values(run, *columns):
    with open(run / "metrics.csv") as file:
        return torch.tensor([[float(row[name]) for name in columns] for row in csv.DictReader(file)])


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_to_float32_rounding(two, tmp_path):
    one, exact = (train_folder(write_recipe(tmp_path / name, **ALIKE), more) for name, more in SINGLE.items())
    losses = [values(run, "train_loss", "val_loss", "ema_loss") for run in (two, one, exact)]
    assert losses[0].shape == (EPOCHS, 3)
    error, rounding = ((part - losses[2]).abs().max() for part in losses[:2])
    assert error <= 4 * rounding, "two processes err more than float32 does"
    assert rounding < 1e-5
    assert losses[0][-1, 0] < losses[0][0, 0]
    for column in ("images", "lr", "step"):
        assert values(two, column).equal(values(one, column))
    assert values(two, "images").unique().tolist() == [360]


@pytest.mark.slow
def test_two_processes_learn_what_one_learns_in_float64(tmp_path):
    two, one = two_and_one(tmp_path, write_recipe, PRECISE, launcher=TORCHRUN, **ALIKE)
    ours, theirs = content(one)["state_dict"], content(two)["state_dict"]
    for key, value in ours.items():
        if key.startswith(("network.", "ema.")):
            torch.testing.assert_close(value, theirs[key], rtol=1e-9, atol=1e-12)
    columns = [name for name in curve(one)[0] if name != "epoch"]
    rounding = 4 * torch.finfo(torch.float32).eps  # the metrics are float32 sums
    torch.testing.assert_close(values(two, *columns), values(one, *columns), rtol=rounding, atol=0)


def check_lost_process(launcher, rank, two, folder):
    recipe = write_recipe(folder, **ALIKE)
    stopped = command("train", recipe, *TWO, "--trust-recipe", dying(rank), launcher=launcher)
    assert stopped.returncode != 0
    said = [line for line in stopped.stdout.splitlines() if line.startswith("linvit: ")]
    assert len(said) == 1, stopped.stdout
    assert f"so process {1 - rank} stopped too" in said[0]
    assert f"--resume to continue from {folder / 'run' / 'checkpoints' / 'last.ckpt'}" in said[0]
    assert "GLHF" not in stopped.stdout
    assert len(curve(folder / "run")) == 1
    resumed = command("train", recipe, *TWO, "--resume")
    assert resumed.returncode == 0, resumed.stdout
    assert differing(folder / "run", two, fewest=100) == []
    assert curve(folder / "run") == curve(two)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "rank"), [(TORCHRUN, 0), (TORCHRUN, 1), (LINVIT, 0), (LINVIT, 1)])
def test_whichever_process_is_killed_the_other_says_so_and_resume_goes_on(two, tmp_path, launcher, rank):
    check_lost_process(launcher, rank, two, tmp_path)


@pytest.mark.slow
def test_one_process_with_ddp_learns_what_one_without_learns(monkeypatch):
    monkeypatch.setattr(together, "SECONDS", 600)
    assert together.nccl_alone("cpu")["difference"] == 0


@pytest.mark.slow
def test_two_processes_that_are_machines_to_lightning_learn_what_one_learns(monkeypatch):
    monkeypatch.setattr(together, "SECONDS", 600)
    both = together.gloo_pair("cpu")
    assert len(both["together"]) == 4
    assert both["alone"][2] < both["alone"][0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_on_a_gpu_nccl_runs_with_one_process_and_gloo_with_two():
    assert "NCCL version" in together.nccl_alone()["nccl"]
    assert together.gloo_pair()["difference"] <= together.ALLOWED


STUDENTS = {"data": {"max_shift": 0}, "trainer": {"max_epochs": 2, "limit_val_batches": 1.0, "precision": "64-true"}}


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
def test_two_processes_align_and_transfer_what_one_does(kind, settings, tmp_path):
    two, one = two_and_one(tmp_path, write_student_recipe, kind=kind, **STUDENTS, task=settings)
    ours, theirs = content(one)["state_dict"], content(two)["state_dict"]
    for key, value in ours.items():
        if key.startswith(("network.", "original.")):
            torch.testing.assert_close(value, theirs[key], rtol=1e-8, atol=1e-10)
    columns = ("train_loss", "error", "worst", "images")
    torch.testing.assert_close(values(two, *columns), values(one, *columns), rtol=1e-6, atol=0)


SHARDED = {
    "class_path": "lightning.pytorch.strategies.ModelParallelStrategy",
    "init_args": {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False},
}


@pytest.mark.slow
def test_two_processes_with_shards_of_the_weights_train_as_one_with_all(tmp_path):
    groups = {"task": {"ema_decay": None}, "optimizer": {"not_decayed": "none"}, "trainer": {"gradient_clip_val": 1.0}}
    of_two = ["data.batch_size=2", "trainer.devices=2", f"trainer.strategy={json.dumps(SHARDED)}"]
    run, whole = two_and_one(tmp_path, write_language_recipe, of_two=of_two, **groups)
    for ours, theirs in zip(curve(run), curve(whole), strict=True):
        assert float(ours["bits_per_byte"]) == pytest.approx(float(theirs["bits_per_byte"]), rel=1e-4)
    assert largest_difference(run, whole) < 1e-3
    measured = load_run(run).evaluate().by_weights["raw"]
    assert measured["bits_per_byte"] == pytest.approx(float(curve(run)[-1]["bits_per_byte"]), abs=0.2)


@pytest.mark.slow
def test_two_processes_train_and_count_errors_as_one(tmp_path):
    groups = {"task": {"ema_decay": None}, "model": {"conv_norm": "layer"}, "data": {"bands": 0, "times": 0}}
    run, whole = two_and_one(tmp_path, write_speech_recipe, of_two=["data.batch_size=2", *TWO[1:]], **groups)
    for ours, theirs in zip(curve(run), curve(whole), strict=True):
        assert ours["utterances"] == theirs["utterances"] == "6.0"
        assert float(ours["wer"]) == pytest.approx(float(theirs["wer"]), abs=0.07)  # one word of fifteen
        assert float(ours["val_loss"]) == pytest.approx(float(theirs["val_loss"]), rel=1e-3)
    assert largest_difference(run, whole) < 1e-3
    measured = load_run(run).evaluate().by_weights["raw"]
    rates = {float(row["wer"]) for row in curve(run)}
    assert measured["wer"] == pytest.approx(min(rates))
