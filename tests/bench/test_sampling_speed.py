"""`linvit bench sampling` on small images."""

import pytest
import torch

from linvit.bench.checks import WrongResultError
from linvit.bench.progress import Progress
from linvit.bench.rows import Report
from linvit.bench.sampling import Options, measure
from linvit.models.dit import DiT


def measured(**options):
    report = Report("sampling")
    measure(Options(**{"sides": (8, 16), "rounds": 1, **options}), report, Progress())
    return report


def test_mechanisms_are_checked_and_timed_side_by_side():
    rows = measured(memory=True).rows
    assert [(row.name, row.tokens, row.size) for row in rows] == [
        ("softmax", 16, (8, 8)),
        ("mala", 16, (8, 8)),
        ("softmax", 64, (16, 16)),
        ("mala", 64, (16, 16)),
    ]
    assert all(row.median_ms > 0 and 0 < row.error < 1e-5 for row in rows)
    assert rows[1].against["softmax"] > 0


def test_a_wrong_pass_is_refused(monkeypatch):
    monkeypatch.setattr(DiT, "forward", lambda self, image, time, label: torch.rand_like(image))
    with pytest.raises(WrongResultError, match="softmax at 8 px computes a wrong result"):
        measured()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="dit_nona_patch2"):
        Options(network="dit_nona_patch2")


def test_every_side_is_tried_before_anything_is_timed():
    with pytest.raises(ValueError, match="33"):
        Options(sides=(16, 33))
    assert Options(sides=()).sides == ()
