import argparse
import os

import pytest
import timm
import torch
from golden_networks import NAMES, golden, released_state_dict
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import linvit
from linvit.released import convert

SMALLEST = ("RAVLT_T", "CARETrans_S0")


@pytest.fixture(scope="module")
def released():
    return {
        name: {k: v.float() for k, v in released_state_dict(golden(name)).items()} for name in (*SMALLEST, "MALA_T")
    }


@pytest.fixture(scope="module")
def ravlt():
    return timm.create_model("ravlt_tiny")


def copy_of(model):
    return {key: value.clone() for key, value in model.state_dict().items()}


def holds(model, state):
    """Whether the model's layer scales and classifier are those of a released state dict."""
    own = model.state_dict()
    pairs = [("stages.2.blocks.3.gamma_2", "layers.2.blocks.3.gamma_2"), ("head.fc.weight", "head.weight")]
    return all(torch.equal(own[ours].flatten(), state[theirs].flatten()) for ours, theirs in pairs)


def other_values(state):
    return {
        key: value + 1 if value.is_floating_point() and "angle" not in key else value for key, value in state.items()
    }


def test_files(ravlt, released, tmp_path):
    state = released["RAVLT_T"]
    for name in ("weights.pth", "weights.safetensors"):
        linvit.load_released(ravlt, other_values(state))
        if name.endswith(".pth"):
            torch.save({"model": state, "args": argparse.Namespace(lr=1e-3)}, tmp_path / name)
        else:
            save_file(state, tmp_path / name)
        linvit.load_released(ravlt, tmp_path / name)
        assert holds(ravlt, state)
        linvit.load_released(ravlt, str(tmp_path / name))


def test_counters_of_batch_norms_may_be_absent(ravlt, released):
    state = {key: value for key, value in released["RAVLT_T"].items() if "num_batches_tracked" not in key}
    linvit.load_released(ravlt, state)
    assert holds(ravlt, state)


def test_all_faults_in_one_error_and_the_model_unchanged(ravlt, released):
    state = dict(released["RAVLT_T"])
    del state["layers.1.blocks.0.pos.weight"], state["norm.running_var"]
    state["layers.0.blocks.1.attn.lepe.weight"] = torch.zeros(64, 1, 3, 3)
    state["head.weight"], state["head.bias"] = torch.zeros(21, 1024, 1, 1), torch.zeros(21)
    state["aux.weight"] = torch.zeros(2, 7)
    before = copy_of(ravlt)
    with pytest.raises(ValueError, match="does not fit this RAVLT in 6 keys") as caught:
        linvit.load_released(ravlt, state)
    listing = str(caught.value).splitlines()[1:]
    assert {line.strip() for line in listing} == {
        "missing final_conv.norm.running_var (1024,)",
        "missing stages.1.blocks.0.cpe.weight (128, 1, 3, 3)",
        "misshapen head.fc.bias: checkpoint (21,), model (1000,)",
        "misshapen head.fc.weight: checkpoint (21, 1024), model (1000, 1024)",
        "misshapen stages.0.blocks.1.attn.lepe.weight: checkpoint (64, 1, 3, 3), model (64, 1, 5, 5)",
        "unexpected aux.weight (2, 7)",
    }
    assert all(torch.equal(value, before[key]) for key, value in ravlt.state_dict().items())


@pytest.mark.parametrize(
    ("released_name", "name"),
    [("CARETrans_S0", "ravlt_tiny"), ("RAVLT_T", "care_s0"), ("RAVLT_T", "mavit_tiny"), ("MALA_T", "ravlt_nano")],
)
def test_checkpoint_of_another_model(released, released_name, name):
    model = timm.create_model(name)
    before = copy_of(model)
    with pytest.raises(ValueError, match=r"missing|unexpected|misshapen|head widths"):
        linvit.load_released(model, released[released_name])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_model_of_someone_else(released):
    with pytest.raises(ValueError, match="`model` is of type Linear, expected a network of linvit"):
        linvit.load_released(torch.nn.Linear(2, 2), released["RAVLT_T"])


def test_a_training_checkpoint_without_weights(ravlt):
    with pytest.raises(ValueError, match="unexpected epoch of type int"):
        linvit.load_released(ravlt, {"epoch": 3})


def test_rotary_angles_are_compared(ravlt, released):
    state = dict(released["RAVLT_T"])
    key = "layers.2.RoPE.angle"
    state[key] = state[key] * 1.0001
    with pytest.raises(ValueError, match=r"layers\.2\.RoPE\.angle has other angles"):
        linvit.load_released(ravlt, state)
    state[key] = state[key][:16]
    with pytest.raises(ValueError, match=r"shape \(16,\), expected \(32,\).*head widths"):
        linvit.load_released(ravlt, state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rotary_angles_in_another_dtype(ravlt, released, dtype):
    angle = (1 / 10000 ** torch.linspace(0, 1, 16)).repeat_interleave(2)  # as the released code makes it
    state = {key: angle.to(dtype) if "angle" in key else value for key, value in released["RAVLT_T"].items()}
    linvit.load_released(ravlt, state)


def test_other_mechanisms_than_the_released_ones_are_announced(released):
    network = timm.create_model("ravlt_tiny_linear")
    with pytest.raises(ValueError, match="belong to pattern LLSS, the model has LLLL"):
        linvit.load_released(network, released["RAVLT_T"])
    with pytest.warns(UserWarning, match="belong to pattern LLSS, the model has LLLL"):
        linvit.load_released(network, released["RAVLT_T"], other_pattern=True)


@pytest.mark.parametrize("released_name", SMALLEST)
def test_convert_writes_what_timm_reads(released, released_name, tmp_path):
    name, target = NAMES[released_name], tmp_path / "out.safetensors"
    assert convert(released[released_name], target, name) == target
    model = timm.create_model(name, checkpoint_path=str(target)).eval()
    expected = linvit.load_released(timm.create_model(name), released[released_name]).eval()
    x = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        assert_close(model(x), expected(x), rtol=0, atol=0)
    assert linvit.load_released(expected, target) is expected


def test_convert_leaves_the_old_file_when_it_fails(released, tmp_path, monkeypatch):
    target = tmp_path / "out.safetensors"
    save_file({"old": torch.ones(1)}, target)

    def full_disk(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("linvit.released.save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        convert(released["RAVLT_T"], target, "ravlt_tiny")
    assert os.listdir(tmp_path) == ["out.safetensors"]
    assert list(load_file(target)) == ["old"]


def test_convert_to_an_impossible_target(released, tmp_path):
    with pytest.raises(ValueError, match=r"ending in \.safetensors"):
        convert(released["RAVLT_T"], tmp_path / "out.pth", "ravlt_tiny")
    with pytest.raises(FileNotFoundError, match="create it first"):
        convert(released["RAVLT_T"], tmp_path / "missing" / "out.safetensors", "ravlt_tiny")
