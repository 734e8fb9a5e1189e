"""Loss curves of a nano network on small images."""

import pytest

from evidence.bench import curves
from evidence.bench.curves import Options, figures
from linvit.bench.page import sentences
from linvit.bench.rows import Progress, Report, Row

NANO = {"names": ("care_nano",), "size": (32, 32), "batch": 4, "rounds": 1, "steps": 2}


def test_loss_curves_are_measured_after_the_steps():
    report = Report("curves")
    curves.measure(Options(**NANO, variants=("plain", "reference", "bf16")), report, Progress())
    assert [row.variant for row in report.rows] == ["plain", "reference", "bf16"]
    found = report.findings["curves"]["care_nano"]
    assert [len(curve["losses"]) for curve in found.values()] == [2] * 3
    assert found["plain"]["deviation"] == 0
    assert found["bf16"]["noise"] > found["reference"]["noise"] > 0
    assert (
        "loss curve of care_nano plain: agrees with plain, at most 0.0e+00 off in 2 steps" in list(sentences(report))[1]
    )


def test_a_curve_that_differs_does_not_agree(monkeypatch):
    losses = iter([[1.0, 0.5], [1.0, 0.501], [1.0, 0.5], [1.0, 0.51]])
    monkeypatch.setattr(curves, "_losses", lambda *_: next(losses))
    options = Options(**NANO, variants=("plain", "channels_last"))
    found = curves.loss_curves("care_nano", options, Progress())
    assert found["plain"]["agrees"]
    assert found["channels_last"]["deviation"] == pytest.approx(0.01)
    assert not found["channels_last"]["agrees"]


def test_loss_curves_are_drawn():
    report = Report("train", rows=[Row("a", "plain", "float32", 4, 1, "step", size=(32, 32), median_ms=1.0)])
    report.findings["curves"] = {
        "a": {
            "plain": {"losses": [2.0, 1.0], "noise": 1e-6},
            "bf16": {"losses": [2.01, 1.01], "noise": 1e-2},
        }
    }
    ((name, figure),) = figures(report)
    assert name == "loss_a"
    assert len(figure.axes) == 2
