"""Exported files against the networks that they were made from, and as runs."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from tiers import quick, slow
from trained import ONE_EPOCH, trained_run

import linvit
from linvit.deploy.facts import KEY, facts_in
from linvit.deploy.formats import FORMATS, opened
from linvit.deploy.runtimes import PACKAGE
from linvit.runs import load_run
from linvit_cli import main

SMALL = {"name": "ravlt_nano", "depths": [1, 1, 1, 1]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(trained_run(tmp_path_factory, model=SMALL, trainer=ONE_EPOCH))


ANY_SIZE = ".onnx"  # of OpenVINO, which is written through ONNX, for any size only among the slow tests


class Files(dict):
    """The run in each format, written when it is asked for: one for images of any size, the others for one size."""

    def __init__(self, run, folder):
        self.run, self.folder = run, folder

    def __missing__(self, suffix):
        self[suffix] = self.run.export(self.folder / f"digits{suffix}", dynamic=suffix == ANY_SIZE)
        return self[suffix]


@pytest.fixture(scope="module")
def files(run, tmp_path_factory):
    return Files(run, tmp_path_factory.mktemp("files"))


@pytest.fixture
def digits(run):
    return [np.random.default_rng(i).integers(0, 256, (40, 50), dtype=np.uint8) for i in range(3)]


def check_predictions(loaded, run, images, error):
    for got, expected in zip(loaded.predict(images), run.predict(images), strict=True):
        assert dict(got.pairs) == pytest.approx(dict(expected.pairs), abs=error)


@pytest.mark.parametrize("suffix", [".onnx", ".xml", ".pt2"])
def test_a_file_gives_the_predictions_of_its_run(run, files, digits, suffix):
    exported = files[suffix]
    assert exported.difference < 1e-5 * exported.largest
    assert len(set(exported.sizes)) == (3 if suffix == ANY_SIZE else 1)
    loaded = load_run(exported.path)
    assert (loaded.name, loaded.class_names) == (run.name, run.class_names)
    assert loaded.preprocessing == run.preprocessing
    check_predictions(loaded, run, digits, 1e-3)


@pytest.mark.parametrize("suffix", [ANY_SIZE, *slow(".xml")])
def test_a_file_reads_any_size_and_batch(run, files, suffix, tmp_path):
    images = torch.randint(0, 256, (2, 3, 45, 70), dtype=torch.uint8)
    exported = files[suffix] if suffix == ANY_SIZE else run.export(tmp_path / f"digits{suffix}")
    assert len(set(exported.sizes)) == 3
    facts, session = opened(exported.path)
    about = run.preprocessing
    mean, std = (torch.tensor(values)[:, None, None] for values in (about.mean, about.std))
    with torch.no_grad():
        expected = run.network((images / 255 - mean) / std)
    assert facts.dynamic
    torch.testing.assert_close(session(images)[0], expected, atol=1e-5, rtol=1e-4)


def test_what_a_file_says_about_itself_survives(files):
    first = opened(files[".onnx"].path)[0]
    assert first == files[".onnx"].facts
    assert facts_in(first.to_json(), "file") == first
    assert len(first.weights) == 64


def test_no_path_of_this_machine_is_in_a_file(files):
    texts = [files[".xml"].path.read_text()]
    with zipfile.ZipFile(files[".pt2"].path) as archive:
        texts.append(archive.read("digits/models/model.json").decode())
    assert not any(str(linvit.__file__).rsplit("/", 1)[0] in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ravlt_nano", "mavit_nano", "care_nano", "deit_tiny_mala", "swin_tiny_rala", "resnet18"]
)
@pytest.mark.parametrize("suffix", list(FORMATS))
def test_every_family_in_every_format(name, suffix, tmp_path, capfd, on_macos):
    if suffix == PACKAGE:
        on_macos()
        capfd.readouterr()
    torch.manual_seed(0)
    network = timm.create_model(name, num_classes=10).eval()
    exported = linvit.export(
        network, tmp_path / f"network{suffix}", size=64 if "_nano" in name or name == "resnet18" else 224
    )
    assert exported.facts.name == name
    assert exported.difference < (1e-2 if suffix == PACKAGE else 1e-5) * exported.largest  # Core ML: float16
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_linearized_network_with_a_rotation(tmp_path, capfd):
    sizes = {"img_size": 64, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    student = linvit.linearize(timm.create_model("vit_small_patch16_dinov3", **sizes).eval())
    exported = linvit.export(student, tmp_path / "student.onnx", size=64)
    assert (exported.facts.name, exported.facts.dynamic) == ("linearized", True)
    assert len(set(exported.sizes)) > 1
    assert exported.difference < 1e-5 * exported.largest
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_network_is_left_as_it_was(tmp_path):
    network = timm.create_model(SMALL["name"], depths=SMALL["depths"], num_classes=3).half()
    linvit.export(network, tmp_path / "half.pt2", size=32)
    assert network.training
    assert all(weight.dtype == torch.float16 for weight in network.parameters())


@pytest.mark.parametrize(
    ("suffix", "options", "message"),
    [
        (".tflite", {}, r"suffix '.tflite', expected one of .onnx \(ONNX\)"),
        (".pte", {"dynamic": True}, "'?.pte'? files read one size only here"),
        (".onnx", {"compiled": True}, "`compiled` is for .pt2 files"),
        (".pt2", {"dynamic": True}, "expected at least 64 px"),
        (".onnx", {"int8": True}, "`int8` needs images to calibrate on: set `calibrate`"),
        (".onnx", {"report": "x"}, "`report` is for files in 8 bits"),
        (".onnx", {"int8": True, "calibrate": [np.zeros((40, 40), np.uint8)]}, "has 1 readable images, expected 16"),
        (".pt2", {"int8": True, "calibrate": ["."]}, "Files of .pt2 cannot be in 8 bits, expected .onnx, .xml, .pte:"),
    ],
)
def test_a_wrong_request_is_one_sentence_and_leaves_nothing(run, tmp_path, suffix, options, message):
    with pytest.raises(ValueError, match=message):
        run.export(tmp_path / f"digits{suffix}", **options)
    assert not list(tmp_path.iterdir())


def test_a_file_that_this_system_cannot_run_is_written_and_replaced(run, tmp_path, capsys, monkeypatch):
    def write(program, facts, path, inputs, outputs):
        path.mkdir()
        (path / "Manifest.json").write_text(facts)

    core_ml = replace(
        FORMATS[PACKAGE], packages=(), write=write, open=lambda path, *_: ((path / "Manifest.json").read_text(), None)
    )
    monkeypatch.setitem(FORMATS, PACKAGE, core_ml)
    target = tmp_path / "digits.mlpackage"
    for _ in range(2):
        assert main(["export", str(run.path), str(target), "--fixed"]) == 0
        assert "Core ML does not run on this system, so its outputs were not compared" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == [target]
        assert facts_in((target / "Manifest.json").read_text(), target).size == (32, 32)
    assert main(["predict", str(target), str(tmp_path)]) == 2
    assert "digits.mlpackage cannot be run here, because Core ML does not run on" in capsys.readouterr().err


@pytest.mark.slow
def test_an_executorch_file_reads_images_of_any_memory_order(tmp_path):
    layer, images = torch.nn.Conv2d(3, 2, 3), torch.rand(1, 3, 8, 9)
    program = torch.export.export(layer, (images,))
    FORMATS[".pte"].write(program, "{}", tmp_path / "layer.pte", ["images"], ["maps"])
    about, session = FORMATS[".pte"].open(tmp_path / "layer.pte", None, "float32")
    assert about == "{}"
    for same in (images, images.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(session(same)[0], layer(images))


@pytest.mark.parametrize(("weight", "fits"), [(6e4, True), (7e4, False), (-torch.inf, True)])
def test_core_ml_refuses_weights_that_float16_does_not_have(weight, fits, tmp_path):
    layer, images = torch.nn.Conv2d(3, 1, 1), torch.zeros(1, 3, 8, 8)
    torch.nn.init.constant_(layer.bias, weight)
    program = torch.export.export(layer, (images,))
    refusal = pytest.raises(ValueError, match=r"the weight bias is too large for float16")
    with nullcontext() if fits else refusal:
        FORMATS[PACKAGE].write(program, "{}", tmp_path / f"layer{PACKAGE}", ["images"], ["maps"])


@pytest.mark.slow
def test_a_core_ml_file_gives_the_predictions_of_its_run(run, digits, tmp_path, on_macos):
    from coremltools.models import MLModel

    on_macos()
    exported = run.export(tmp_path / "digits.mlpackage")
    assert exported.difference < 1e-2 * exported.largest  # float16
    about = MLModel(str(exported.path), skip_model_load=True).user_defined_metadata[KEY]
    assert facts_in(about, "file") == exported.facts
    check_predictions(load_run(exported.path), run, digits, 1e-2)
    (exported.path / "Manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"Core ML cannot read .*digits.mlpackage.*: export it again"):
        load_run(exported.path)


@pytest.mark.slow
def test_machine_code_is_written_and_never_opened(run, tmp_path):
    exported = run.export(tmp_path / "digits.pt2", size=64, compiled=True)
    assert exported.format == "AOTInductor"
    assert exported.difference < 1e-5 * exported.largest
    assert torch._inductor.aoti_load_package(str(exported.path)).get_metadata()[KEY] == exported.facts.to_json()
    with pytest.raises(ValueError, match=r"contains machine code, which linvit never runs"):
        load_run(exported.path)


def test_machine_code_needs_a_compiler(run, tmp_path, monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing():
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(ImportError, match=r"needs a C\+\+ compiler, but none was found: install g\+\+ or clang"):
        run.export(tmp_path / "x.pt2", compiled=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_not_replaced(run, tmp_path):
    kept = tmp_path / "photos.mlpackage" / "photo.png"
    kept.parent.mkdir()
    kept.touch()
    with pytest.raises(ValueError, match=r"photos.mlpackage is a folder"):
        run.export(kept.parent)
    assert kept.is_file()


def test_a_missing_runtime_names_its_extra(run, tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.deploy.formats.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ONNX needs onnx.* install it with `pip install 'linvit\[onnx\]'`"):
        run.export(tmp_path / "digits.onnx")


def test_random_bytes_with_the_suffix_of_executorch_do_not_end_the_process(tmp_path):
    pytest.importorskip("executorch")
    (tmp_path / "x.pte").write_bytes(np.random.default_rng(0).bytes(4000))
    with pytest.raises(ValueError, match="first bytes are not those of an ExecuTorch file"):
        load_run(tmp_path / "x.pte")


@pytest.mark.parametrize("special", ["pipe", "device", "folder"])
def test_only_regular_files_are_opened(tmp_path, special):
    path = tmp_path / "x.onnx"
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "folder": Path.mkdir}[special](path)
    with pytest.raises(ValueError, match=r"cannot read .* \(it is a"):
        load_run(path)


@pytest.mark.parametrize(
    ("facts", "match"),
    [
        ({"class_names": ["a"] * 9}, "expected finite numbers for 9 classes"),
        ({"outputs": ["logits", "boxes"]}, "has 1 outputs, but describes 2"),
        ({"std": [-1.0]}, "damaged"),
        ({"mean": [], "std": []}, "damaged|channels"),
        ({"task": "detection"}, "damaged"),
    ],
)
@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_facts_that_do_not_fit_the_file_end_in_one_sentence(files, tmp_path, digits, suffix, facts, match):
    with pytest.raises(ValueError, match=match):
        load_run(_with_facts(files[suffix].path, tmp_path / f"x{suffix}", facts)).predict(digits)


def _with_facts(source, path, facts):
    if path.suffix == ".onnx":
        onnx = pytest.importorskip("onnx")
        model = onnx.load(source)
        entry = next(x for x in model.metadata_props if x.key == KEY)
        entry.value = json.dumps(json.loads(entry.value) | facts)
        onnx.save(model, path)
        return path
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, json.dumps(json.loads(content) | facts) if name.endswith("extra/linvit") else content)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("opset", [18, 21])
def test_an_onnx_file_has_the_opset_that_is_asked_for_and_names_its_sizes(run, tmp_path, opset):
    onnx = pytest.importorskip("onnx")
    model = onnx.load(run.export(tmp_path / "x.onnx", opset=opset, dynamic=True).path)
    assert [x.version for x in model.opset_import] == [opset]
    shape = model.graph.input[0].type.tensor_type.shape
    assert [x.dim_param or x.dim_value for x in shape.dim] == ["batch", 3, "height", "width"]
    sizes = {x.dim_param for value in model.graph.value_info for x in value.type.tensor_type.shape.dim}
    assert not any(re.search(r"\bs\d+\b", size) for size in sizes)
    with pytest.raises(ValueError, match=r"`opset` is for \.onnx files"):
        run.export(tmp_path / "x.xml", opset=18)
    with pytest.raises(ValueError, match="`opset` is 17, expected a whole number from 18 to 23"):
        run.export(tmp_path / "x.onnx", opset=17)


@pytest.mark.slow
def test_large_weights_lie_beside_the_file(run, tmp_path, digits, monkeypatch):
    module = pytest.importorskip("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr(module, "_LARGE_MODEL_THRESHOLD", 1000)
    path = run.export(tmp_path / "x.onnx").path
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.onnx", "x.onnx.data"]
    assert [x.classes for x in load_run(path).predict(digits)] == [x.classes for x in run.predict(digits)]


@pytest.mark.slow
@pytest.mark.parametrize("link", [False, True])
def test_weights_of_onnx_outside_of_its_folder_are_refused(run, tmp_path, monkeypatch, link):
    onnx = pytest.importorskip("onnx")
    module = pytest.importorskip("torch.onnx._internal.exporter._onnx_program")
    monkeypatch.setattr(module, "_LARGE_MODEL_THRESHOLD", 1000)
    path = run.export(tmp_path / "in" / "x.onnx").path
    data = path.with_name("x.onnx.data").rename(tmp_path / "outside")
    if link:
        path.with_name("x.onnx.data").symlink_to(data)
    else:
        model = onnx.load(path, load_external_data=False)
        for weight in model.graph.initializer:
            for entry in weight.external_data:
                entry.value = "../outside" if entry.key == "location" else entry.value
        path.write_bytes(model.SerializeToString())
    with pytest.raises(ValueError, match=r"x\.onnx"):
        load_run(path)


@pytest.mark.parametrize("suffix", quick([".onnx", ".xml", ".pt2"], [".pt2"]))
def test_a_run_of_a_file_can_be_pickled(files, digits, suffix):
    loaded = load_run(files[suffix].path)
    again = pickle.loads(pickle.dumps(loaded))
    assert [x.probabilities for x in again.predict(digits)] == [x.probabilities for x in loaded.predict(digits)]


def test_a_file_of_openvino_without_its_weights_says_so(files, tmp_path):
    alone = tmp_path / "alone.xml"
    alone.write_bytes(files[".xml"].path.read_bytes())
    with pytest.raises(ValueError, match=r"its weights, alone.bin, are not beside it"):
        load_run(alone)


CLOSE_IN_ORDER = """
import subprocess, sys
from pathlib import Path
from torch.utils.data import DataLoader
from linvit.deploy.formats import FORMATS

sessions = [FORMATS[".xml"].open(Path(sys.argv[1]), 1, "float32") for _ in range(2)]
while sessions:
    del sessions[0]
list(DataLoader([1], num_workers=1))
subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.slow
def test_files_of_openvino_may_be_closed_in_any_order(files):
    """With two Cores, the process ends in a segmentation fault at the next signal."""
    command = [sys.executable, "-c", CLOSE_IN_ORDER, str(files[".xml"].path)]
    assert subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.slow
def test_a_vit_of_one_size_has_a_file_of_that_size(tmp_path):
    sizes = {"img_size": 32, "patch_size": 16, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 2}
    vit = timm.create_model("deit_tiny_patch16_224", **sizes)
    assert linvit.export(vit, tmp_path / "x.onnx", size=32).facts.dynamic is False
    with pytest.raises(ValueError, match="cannot be exported for any size: set `dynamic=False`"):
        linvit.export(vit, tmp_path / "x.onnx", size=32, dynamic=True)


@pytest.mark.slow
def test_a_file_for_any_size_is_compared_at_multiples_of_the_patches(tmp_path):
    sizes = {"img_size": 70, "embed_dim": 16, "depth": 1, "num_heads": 1, "num_classes": 2}
    vit = timm.create_model("vit_small_patch14_dinov2", dynamic_img_size=True, **sizes)
    exported = linvit.export(linvit.linearize(vit, "mala"), tmp_path / "x.pt2", size=70)
    assert set(exported.sizes) == {(70, 70), (84, 84), (112, 112)}, "56 px are fewer than a .pt2 file reads"


@pytest.mark.slow
def test_a_runtime_that_cannot_run_its_file_is_one_sentence(tmp_path, capfd, monkeypatch):
    """Between two pieces of XNNPACK, ExecuTorch mistakes the order of a map with one position."""
    monkeypatch.setattr("linvit.deploy.runtimes.for_xnnpack", lambda program: program)
    network = timm.create_model("ravlt_nano", depths=[1, 1, 1, 1]).eval()
    with pytest.raises(ValueError, match=r"ExecuTorch cannot run this network at its size .*: try a larger `size`"):
        linvit.export(network, tmp_path / "x.pte", size=32)
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().err == ""


def test_a_file_of_another_program_is_refused(files, tmp_path):
    import onnx

    model = onnx.load(files[".onnx"].path)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "other.onnx")
    with pytest.raises(ValueError, match="was not written by `linvit export`"):
        load_run(tmp_path / "other.onnx")


def test_the_command_line_exports_predicts_and_evaluates(run, files, tmp_path, capsys):
    target = tmp_path / "digits.pt2"
    assert main(["export", str(run.path), str(target), "--size", "48", "--fixed"]) == 0
    text = capsys.readouterr().out
    assert f"{target} is written for torch.export." in text
    assert "differ from the network's by at most" in text
    assert "(images of 48×48 px)" in text
    Image.fromarray(np.zeros((20, 20), dtype=np.uint8)).save(tmp_path / "digit.png")
    assert main(["predict", str(files[".onnx"].path), str(tmp_path / "digit.png")]) == 0
    assert main(["eval", str(files[".onnx"].path), "data=digits"]) == 0
    assert "%" in capsys.readouterr().out
