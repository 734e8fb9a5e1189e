"""The check of a GPU, without one: its page and record, and what "auto" makes of the record."""

import json
from types import SimpleNamespace

import pytest
import torch

from linvit import kernels
from linvit.bench import gpu
from linvit.bench.checks import WrongResultError
from linvit.bench.exactness import Deviation
from linvit.bench.gpu import Check, check_gpu
from linvit.kernels import record
from linvit.ops.backend import kernel_for
from linvit_cli import main

GOOD = Check("rala, float32, 9 tokens, width 16", Deviation("output", 1e-7, 2e-7), None)
BAD = Check("mala, float16, 9 tokens, width 16", Deviation("key", 3e-3, 2e-3), "key: error 3.0e-03, allowed 2.0e-03")
QUERY = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))


@pytest.fixture(autouse=True)
def pretended(monkeypatch, tmp_path):
    """A GPU that is not there, and records of its own."""
    pytest.importorskip("triton")
    monkeypatch.setenv(record.FOLDER, str(tmp_path / "records"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU/80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "obstacle", lambda *_, **__: None)
    monkeypatch.setattr(gpu, "BENCHMARKS", {})
    record.forget()
    yield
    record.forget()


def finding(monkeypatch, *checks):
    monkeypatch.setattr(gpu, "checks", lambda device, progress: list(checks))


def used():
    return kernel_for("auto", QUERY, QUERY, QUERY)


def test_the_kernels_are_used_after_they_have_passed(monkeypatch, tmp_path):
    assert used() is None
    finding(monkeypatch, GOOD)
    assert check_gpu(tmp_path) == [GOOD]
    assert used() is kernels.linear_attention
    page = (tmp_path / gpu.PAGE).read_text()
    assert page.startswith("# Some GPU/80GB\n\nThe kernels are exact on this GPU")
    assert "| rala, float32, 9 tokens, width 16 | output | 1.0e-07 | 2.0e-07 | passed |" in page
    with record.trusted(False):
        assert used() is None


def test_one_failure_keeps_them_from_being_used(monkeypatch, tmp_path, capsys):
    finding(monkeypatch, GOOD, BAD)
    assert main(["check-gpu", "--folder", str(tmp_path)]) == 1
    assert used() is None
    (file,) = (tmp_path / "records").iterdir()
    assert json.loads(file.read_text())["failures"] == {BAD.case: BAD.failure}
    printed = capsys.readouterr().out
    assert f"{BAD.case}: key: error 3.0e-03" in printed
    assert "1 of 2 cases passed. The kernels are not exact on this GPU" in printed


def test_a_network_that_is_wrong_with_them_keeps_them_from_being_used_too(monkeypatch, tmp_path):
    def measure(kind, progress, **options):
        raise WrongResultError("ravlt_tiny fused+triton computes a wrong result")

    finding(monkeypatch, GOOD)
    monkeypatch.setattr(gpu, "BENCHMARKS", {"networks": ("model", {})})
    monkeypatch.setattr(gpu.kinds, "measure", measure)
    assert [check.failure for check in check_gpu(tmp_path)] == [None, "ravlt_tiny fused+triton computes a wrong result"]
    assert used() is None
    assert "| benchmark networks | – | – | – | ravlt_tiny fused+triton" in (tmp_path / gpu.PAGE).read_text()


@pytest.mark.parametrize("change", ["torch", "kernels", "gpu"])
def test_a_record_holds_for_nothing_else(monkeypatch, tmp_path, change):
    finding(monkeypatch, GOOD)
    check_gpu(tmp_path)
    now = {**record.about(), change: "another"}
    monkeypatch.setattr(record, "about", lambda index=0: now)
    record.forget()
    assert used() is None


def test_a_damaged_record_counts_as_none(monkeypatch, tmp_path):
    finding(monkeypatch, GOOD)
    check_gpu(tmp_path)
    for text in ("{", "[]", '{"passed": true}'):
        record.path(record.about()).write_text(text)
        record.forget()
        assert used() is None


def test_without_a_gpu_one_sentence(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["check-gpu", "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == (
        "linvit: torch sees no GPU here: run this on a machine where torch.cuda.is_available() is true."
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"cannot run on this machine: the GPU's compute capability is 7\.5"):
        check_gpu(tmp_path)
