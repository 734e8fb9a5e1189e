"""`linvit bench train` on a nano network and small images."""

import pytest

from linvit.bench import rows, training
from linvit.bench.exactness import WrongResultError
from linvit.bench.options import TrainingOptions
from linvit.bench.rows import Progress, Report
from linvit.bench.training import measure

NANO = {"names": ("care_nano",), "size": (32, 32), "curve_size": (32, 32), "batch": 4, "curve_batch": 2, "rounds": 1}


def measured(**options):
    report = Report("train")
    measure(TrainingOptions(**{**NANO, **options}), report, Progress())
    return report


def test_steps_and_loss_curves():
    report = measured(variants=("plain", "reference", "bf16", "checkpointing"), curve_steps=2)
    assert [row.variant for row in report.rows] == ["plain", "reference", "bf16", "checkpointing"]
    assert all(row.median_ms > 0 and row.work == "step" for row in report.rows)
    assert report.rows[2].dtype == "bfloat16"
    assert report.rows[2].against["reference"] > 0
    curves = report.findings["curves"]["care_nano"]
    assert [len(found["losses"]) for found in curves.values()] == [2] * 4
    assert curves["plain"]["deviation"] == 0
    assert curves["bf16"]["noise"] > curves["reference"]["noise"] > 0


def test_a_step_that_cannot_run_says_why():
    plain, triton = measured(variants=("plain", "bf16+triton")).rows
    assert plain.median_ms > 0
    assert triton.skipped == "the kernels cannot run: the tensors are on cpu, and the kernels need CUDA tensors"


def test_a_wrong_step_is_refused(monkeypatch):
    monkeypatch.setattr(training, "reference_model", lambda network: training.randomised(network, seed=2).train())
    monkeypatch.setattr(rows, "interleave", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match="care_nano reference at 32 × 32, batch 4"):
        measured(variants=("plain", "reference"))


def test_a_curve_that_differs_does_not_agree(monkeypatch):
    losses = iter([[1.0, 0.5], [1.0, 0.501], [1.0, 0.5], [1.0, 0.51]])
    monkeypatch.setattr(training, "_losses", lambda *_: next(losses))
    options = TrainingOptions(**NANO, variants=("plain", "channels_last"), curve_steps=2)
    found = training.loss_curves("care_nano", options, Progress())
    assert found["plain"]["agrees"]
    assert found["channels_last"]["deviation"] == pytest.approx(0.01)
    assert not found["channels_last"]["agrees"]
