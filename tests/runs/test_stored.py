"""Checkpoints whose metadata was changed: each works or ends in one sentence, quickly and in little memory."""

import copy
import math
import resource
import shutil

import pytest
import torch
from tiny_run import content
from trained import ONE_EPOCH, trained_run

from linvit.runs import load_run
from linvit.runs.stored import read_resumable

MEMORY = 512 << 10  # KiB that a refusal may add to the process


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained_run(tmp_path_factory, data={"size": 32}, trainer=ONE_EPOCH)


def replaced(whole, *path, value):
    whole = copy.deepcopy({key: item for key, item in whole.items() if key != "state_dict"}) | {
        "state_dict": whole["state_dict"]
    }
    holder = whole
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = value
    return whole


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("recipe", "task", "ema_decay"), 2, "task.ema_decay is 2, expected a number"),
        (("recipe", "task", "name"), "diffusion", "data.name is 'digits'"),
        (("recipe", "task"), {"name": "classification"}, "the entry 'ema_decay' is missing"),
        (("recipe", "model"), {"name": "ravlt_nano", "depths": [10**6] * 4}, "its model has depths 1000000"),
        (("recipe", "model"), {"name": "vit_tiny_patch16_224", "embed_dim": 30000}, "larger than the weights"),
        (("recipe", "model"), {"name": "mobilenetv3_small_050"}, "do not fit the model"),
        (("recipe", "model"), {"name": "hf-hub:none/of-these"}, "would be read from a hub"),
        (("recipe", "model"), {"name": "vit_large_patch16_224"}, "larger than the weights"),
        (("class_names",), ["a"], "it has 10 classes, but 1 class names"),
        (("class_names",), list(range(10)), "`class_names` is"),
        (("preprocessing", "std"), [0.0], "preprocessing.std is"),
        (("preprocessing", "mean"), [0.5], "lengths"),
        (("preprocessing", "size"), [10**9, 10**9], "preprocessing.size is"),
        (("preprocessing", "crop_pct"), math.nan, "preprocessing.crop_pct is nan"),
        (("num_classes",), 10**9, "1000000000 classes"),
        (("format",), 2, "`format` is 2"),
        (("recipe", "data", "extra"), 1, "Unknown setting of the data 'extra'"),
        (("recipe", "trainer", "threads"), ["a", 3], "trainer.threads is ['a', 3], expected a whole number"),
        (("recipe", "trainer"), "", "`trainer` is"),
    ],
)
def test_what_is_wrong_is_said(run, tmp_path, place, value, said):
    torch.save(replaced(content(run), "linvit", *place, value=value), tmp_path / "changed.ckpt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"\A[^\n]*changed\.ckpt[^\n]*\Z") as refusal:
        load_run(tmp_path / "changed.ckpt")
    assert said in str(refusal.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def test_pretrained_weights_that_a_checkpoint_asks_for_are_not_fetched(run, tmp_path, monkeypatch):
    monkeypatch.setattr("timm.models._builder.load_pretrained", lambda *_, **__: pytest.fail("it was fetched"))
    model = {"name": "ravlt_nano", "drop_path_rate": 0.2, "pretrained": True}
    torch.save(replaced(content(run), "linvit", "recipe", "model", value=model), tmp_path / "changed.ckpt")
    with pytest.raises(ValueError, match="weights are never downloaded here"):
        load_run(tmp_path / "changed.ckpt")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(run, tmp_path, value):
    whole = content(run)
    name = next(key for key in whole["state_dict"] if key.startswith("ema.module."))
    whole["state_dict"][name].view(-1)[0] = value
    torch.save(whole, tmp_path / "diverged.ckpt")
    with pytest.raises(ValueError, match=f"the weights '{name}' are not finite"):
        load_run(tmp_path / "diverged.ckpt")


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (("epoch",), -1, "`epoch` is -1"),
        (("global_step",), "x", "`global_step` is 'x'"),
        (("optimizer_states",), {}, "`optimizer_states` is"),
        (("optimizer_states", 0, "param_groups", 0, "weight_decay"), math.nan, "is nan"),
        (("optimizer_states", 0, "state", 0, "exp_avg"), torch.zeros(7, 7, 7), "fits no parameter"),
        (("loops",), None, "`loops` is null"),
        (("loops", "fit_loop", "epoch_progress"), [1], "record of the training does not fit"),
    ],
)
def test_a_training_does_not_continue_from_a_changed_checkpoint(run, tmp_path, place, value, said):
    torch.save(replaced(content(run), *place, value=value), tmp_path / "changed.ckpt")
    with pytest.raises(ValueError, match="cannot be used") as refusal:
        read_resumable(tmp_path / "changed.ckpt")
    assert said in str(refusal.value)


@pytest.mark.parametrize("held", [b"epoch,loss\n1,abc\n", b"\xff\x00,,\n,,,,1\n", b"epoch\n1,2,3\n"])
def test_damaged_training_curves_are_one_sentence(run, tmp_path, held):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "metrics.csv").write_bytes(held)
    with pytest.raises(ValueError, match=r"metrics\.csv are damaged .*: remove the file"):
        load_run(tmp_path / "run").history  # noqa: B018


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"crop_pct": -1}, "`crop_pct` is -1"),
        ({"size": 10**9}, "`size` is"),
        ({"mean": [0.5]}, "`mean` is .*, expected 3 numbers"),
        ({"std": [0.0, 0.5, 0.5]}, "`std` is"),
        ({"sise": 3}, "Did you mean 'size'"),
    ],
)
def test_a_preprocessing_that_cannot_be_is_refused(run, settings, said):
    with pytest.raises(ValueError, match=said):
        load_run(run).prepare(**settings)
