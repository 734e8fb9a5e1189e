"""Files that linvit wrote long ago (tests/golden/written) are still read, give what they gave, and go on training.

The networks of checkpoints compute in float64, in which machines, kernels and orders of summation differ by less than
1e-12: 1e-6 is far above that, and far below what a change of a formula, of the order of channels or of the
preprocessing makes.
Exported files compute in float32 in their runtimes, whose products and sums of some hundred terms differ by a few 1e-6
of the largest number between machines: 1e-5, as when they were written.
"""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest
import timm
import torch
from tiny_run import content, curve

import linvit
from linvit.runs.training import train_folder

WRITTEN = Path(__file__).parents[1] / "golden" / "written"
sys.path.insert(0, str(WRITTEN))
from write import OUTPUTS, STOPPED_AT, noise, pixels, probed  # noqa: E402

EXPORTED = ["network.onnx", "network.xml", "network.pt2"]
ABOUT = json.loads((WRITTEN / "about.json").read_text())


def differs(outputs, recorded) -> float:
    """The largest difference from what is recorded, relative to the largest number of the tensor."""
    given = probed(outputs)
    assert [entry["shape"] for entry in given] == [entry["shape"] for entry in recorded]
    return max(
        abs(one - other) / was["largest"]
        for entry, was in zip(given, recorded, strict=True)
        for one, other in zip(entry["values"], was["values"], strict=True)
    )


@pytest.mark.parametrize("task", OUTPUTS)
@torch.inference_mode()
def test_a_checkpoint_gives_what_it_gave(task):
    run = linvit.load_run(WRITTEN / task)
    assert run.task_name == task
    assert differs(OUTPUTS[task](run.network.double()), ABOUT[task]) < 1e-6


@pytest.mark.parametrize("name", ["classification", "hub", *EXPORTED])
def test_predictions_are_those_of_then(name):
    pairs = linvit.load_run(WRITTEN / name).predict(pixels())[0].pairs
    assert dict(pairs) == pytest.approx(dict(ABOUT["predictions"]), abs=1e-7)  # rounded by 1e-8


@torch.inference_mode()
def test_weights_for_timm_are_those_of_the_run():
    about = json.loads((WRITTEN / "hub" / "config.json").read_text())
    file = str(WRITTEN / "weights.safetensors")
    network = timm.create_model(
        about["architecture"], num_classes=about["num_classes"], checkpoint_path=file, **about["model_args"]
    )
    assert differs(OUTPUTS["classification"](network.double().eval()), ABOUT["classification"]) < 1e-6


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_file_gives_what_it_gave(name):
    network = linvit.load_run(WRITTEN / name).network
    assert differs([network(noise(1, 3, 32, 32).float())], ABOUT[name]) < 1e-5


def test_a_stopped_run_goes_on_in_the_middle_of_its_epoch(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(WRITTEN / "classification", run)
    assert content(run)["global_step"] == STOPPED_AT + 1
    train_folder(WRITTEN / "classification.yaml", folder=run, resume=True)
    assert content(run)["global_step"] == 4
    rows = curve(run)
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(math.isfinite(float(row["train_loss"])) for row in rows)
