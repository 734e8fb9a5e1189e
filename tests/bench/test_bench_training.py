"""`linvit bench train` on a nano network and small images."""

import pytest

from linvit.bench import rows, training
from linvit.bench.exactness import WrongResultError
from linvit.bench.options import TrainingOptions
from linvit.bench.rows import Progress, Report
from linvit.bench.training import measure

NANO = {"names": ("care_nano",), "size": (32, 32), "batch": 4, "rounds": 1}


def measured(**options):
    report = Report("train")
    measure(TrainingOptions(**{**NANO, **options}), report, Progress())
    return report


def test_steps():
    report = measured(variants=("plain", "reference", "bf16", "checkpointing"))
    assert [row.variant for row in report.rows] == ["plain", "reference", "bf16", "checkpointing"]
    assert all(row.median_ms > 0 and row.work == "step" for row in report.rows)
    assert report.rows[2].dtype == "bfloat16"
    assert report.rows[2].against["reference"] > 0


def test_a_step_that_cannot_run_says_why():
    plain, triton = measured(variants=("plain", "bf16+triton")).rows
    assert plain.median_ms > 0
    assert triton.skipped == "the kernels cannot run: the tensors are on cpu, and the kernels need CUDA tensors"


def test_a_wrong_step_is_refused(monkeypatch):
    monkeypatch.setattr(training, "reference_model", lambda network: training.randomised(network, seed=2).train())
    monkeypatch.setattr(rows, "interleave", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match="care_nano reference at 32 × 32, batch 4"):
        measured(variants=("plain", "reference"))
