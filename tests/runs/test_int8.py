"""Exported files in 8 bits: what is rounded, what the files say and lose, and wrong requests."""

import csv

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from trained import ONE_EPOCH, trained_run

import linvit
from linvit.analysis.run_figures import LAYERS, sensitivity_figure
from linvit.deploy.formats import FORMATS, session_of
from linvit.deploy.graph import exported
from linvit.deploy.int8 import equalized, layers_of, names_of, quantized, sensitivity, steps_of
from linvit.runs import load_run
from linvit_cli import main

SMALL = {"name": "ravlt_nano", "depths": [1, 1, 1, 1]}


class Mixed(nn.Module):
    """A dense convolution, a depthwise one before another dense one, a residual depthwise one, a product, a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.between, self.residual = (nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        x = self.first(images.float() / 255)
        x = self.last(self.between(x.relu()))
        x = x + self.residual(x)
        tokens = x.flatten(2)
        state = tokens.exp() @ tokens.mT
        return (self.head((state @ tokens).mean(-1) / 100),)


@pytest.fixture(scope="module")
def images():
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (16, 3, 7, 9), dtype=np.uint8))


@pytest.fixture(scope="module")
def program(images):
    return exported(Mixed().eval(), images[:2], dynamic=True)


def test_layers_with_weights_are_rounded_and_nothing_else(program):
    module = program.module(check_guards=False)
    assert names_of(layers_of(module)) == ["first", "between", "last", "head"]


@pytest.mark.parametrize(("suffix", "roundings"), [(".onnx", 7), (".xml", 4), (".pte", 7)])
def test_a_program_in_8_bits_keeps_its_outputs(program, images, suffix, roundings):
    rounded = quantized(program, images, suffix, dynamic=True)
    targets = [str(node.target) for node in rounded.graph.nodes]
    assert sum("quantized_decomposed.quantize_per_tensor" in target for target in targets) == roundings
    assert sum("dequantize_per_channel" in target for target in targets) == 4
    with torch.no_grad():
        (expected,), (got,) = program.module()(images), rounded.module()(images)
    error = float((got - expected).norm() / expected.norm())
    assert 1e-4 < error < 0.05  # some thousandths for each of seven roundings to 255 steps


class Read(nn.Module):
    """A layer whose output is read by a convolution that stays in float32, by a product and by a sum."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.local = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 5)

    def forward(self, images):
        x = self.first(images.float() / 255)
        tokens = x.flatten(2)
        attended = tokens @ (tokens.mT @ tokens).softmax(1)
        return (self.head((x + self.local(x) + attended.reshape(x.shape)).mean((2, 3))),)


@pytest.mark.slow
def test_executorch_runs_layers_in_8_bits_that_several_steps_read(images, tmp_path):
    program = exported(Read().eval(), images[:1])
    rounded = quantized(program, images, ".pte", dynamic=False)
    session = session_of(FORMATS[".pte"], rounded, tmp_path / "x.pte")
    with torch.no_grad():
        (expected,), (simulated,) = program.module()(images[:1]), rounded.module()(images[:1])
    (got,) = session(images[:1])
    assert 0 < float((got - expected).norm() / expected.norm()) < 0.05
    assert float((got - simulated).norm() / expected.norm()) < 0.02  # one step of 255 in some layers


class Uneven(nn.Module):
    """A convolution that reads channels of very different ranges, side by side; one of them is always zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(17, 5, 1)
        with torch.no_grad():
            self.last.weight[:, :8] /= 1000

    def forward(self, images):
        x = self.first(images.float() / 255)
        return (self.last(torch.cat([1000 * x, x.sigmoid(), 0 * x[:, :1]], 1)),)


def test_what_a_layer_reads_side_by_side_is_rounded_channel_by_channel(images):
    program = exported(Uneven().eval(), images[:2], dynamic=True)
    module = equalized(program.module(check_guards=False), images.split(8))
    (layer,) = [node for node in layers_of(module) if "last" in node.args[1].target]
    assert layer.args[0].target == torch.ops.aten.mul.Tensor
    assert names_of(layers_of(module)) == ["first", "last"]
    rounded = quantized(program, images, ".xml", dynamic=True)
    with torch.no_grad():
        (expected,), (same,) = program.module()(images), module(images)
        (got,) = rounded.module()(images)
    assert float((same - expected).norm() / expected.norm()) < 1e-6  # float32, and the program is as it was
    assert float((got - expected).norm() / expected.norm()) < 0.02  # without the factors 0.8


def test_every_step_is_rounded_to_measure_what_that_loses(program, images):
    def roundings(every_step):
        rounded = quantized(program, images, ".onnx", dynamic=True, every_step=every_step)
        return sum("quantize_per_tensor" in str(node.target) for node in rounded.graph.nodes)

    kinds = steps_of(program.module(check_guards=False))
    assert {"products without weights (state, scores)", "exp (κ)", "other depthwise convolutions"} <= kinds.keys()
    assert roundings(True) >= roundings(False) + sum(map(len, kinds.values()))


def test_the_sensitivity_has_a_row_for_each_layer_and_kind_of_step(program, images):
    rows = {row.name: row for row in sensitivity(program, images, ".onnx", dynamic=True)}
    layers = [name for name, row in rows.items() if row.rounded]
    assert layers == ["first", "between", "last", "head", "all layers in 8 bits, as in the file"]
    assert {"products without weights (state, scores)", "divisions", "other depthwise convolutions"} <= rows.keys()
    assert all(0 < row.error < 1 for row in rows.values())
    rounded = quantized(program, images, ".onnx", dynamic=True)
    with torch.no_grad():
        (expected,), (got,) = program.module()(images), rounded.module()(images)
    error = float((got - expected).norm() / expected.norm())
    assert rows[layers[-1]].error == pytest.approx(error, rel=0.05)


def test_the_figure_shows_the_most_sensitive_layers():
    rows = [(f"stages.{number}.$x", True, 0.001 * (number + 1)) for number in range(40)]
    rows += [("divisions", False, 0.2), ("all layers", True, 0.1), ("every step", False, 0.3)]
    rows.insert(0, ("exp", False, 1e-7))
    axes = sensitivity_figure(rows).axes[0]
    marks = [line for line in axes.lines if line.get_marker() == "<"]
    assert [(mark.get_xdata()[0], mark.get_ydata()[0]) for mark in marks] == [(pytest.approx(3e-4), LAYERS + 1)]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert len(labels) == LAYERS + 4
    assert (labels[0], labels[-4:]) == (r"stages.39.\$x", ["divisions", "exp", "all layers", "every step"])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(trained_run(tmp_path_factory, model=SMALL, trainer=ONE_EPOCH))


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("digits")
    for number, digit in enumerate(load_digits().images[:20]):
        Image.fromarray((digit * 15).astype(np.uint8)).resize((32, 32)).save(folder / f"{number:02}.png")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pte"])
def test_a_file_in_8_bits_predicts_like_its_run(run, digits, suffix, tmp_path):
    (digits / "damaged.png").write_bytes(b"x")
    file = run.export(tmp_path / f"digits{suffix}", size=32, int8=True, calibrate=[digits])
    assert file.facts.calibrated == 20
    assert 1e-5 < file.error < 0.1
    assert file.same >= 0.9
    loaded = load_run(file.path)
    assert loaded.network.facts == file.facts
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 4_000_000


@pytest.mark.slow
def test_the_command_line_writes_8_bits_and_a_report(run, digits, tmp_path, capsys):
    target, report = tmp_path / "digits.onnx", tmp_path / "report"
    given = ["--int8", "--calibrate", str(digits), "--report", str(report), "--fixed"]
    assert main(["export", str(run.path), str(target), *given]) == 0
    text = capsys.readouterr().out
    assert f"{target} is written for ONNX in 8 bits, calibrated on 20 images." in text
    assert "(root mean square)" in text
    assert "The class with the largest logit is the same in" in text
    assert {file.name for file in report.iterdir()} == {f"sensitivity.{end}" for end in ("csv", "pdf", "png", "svg")}
    rows = list(csv.DictReader((report / "sensitivity.csv").read_text().splitlines()))
    assert rows[0]["part"] == "stem.0"
    assert main(["eval", str(target), "data=digits"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".onnx", ".pte"])
@pytest.mark.parametrize("name", ["mavit_nano", "care_nano", "deit_tiny_mala"])
def test_other_networks_in_8_bits(name, suffix, digits, tmp_path):
    network = timm.create_model(name, num_classes=10).eval()
    size = {"size": 32} if "nano" in name else {"dynamic": False}
    assert linvit.export(network, tmp_path / f"x{suffix}", int8=True, calibrate=[digits], **size).error < 0.3


def test_missing_torchao_names_the_extra(run, digits, tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.deploy.int8.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"need torchao: install it with `pip install 'linvit\[int8\]'`"):
        run.export(tmp_path / "digits.onnx", int8=True, calibrate=[digits])
