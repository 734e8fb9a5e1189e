"""`linvit bench memory` on a small segmentor."""

import sys

import pytest

from linvit.bench.kinds import measure
from linvit.bench.segmentation import Options

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the peak of a process can be reset on Linux only"
)


@on_linux
def test_a_segmentor_is_measured_with_its_pattern_and_both_exponents():
    report = measure("memory", names=("ravlt_nano",), sizes=((64, 64), (64, 128)), rounds=1)
    assert [(row.size, row.pattern) for row in report.rows] == [((64, 64), "LLLL"), ((64, 128), "LLLL")]
    assert all(row.median_ms > 0 and row.peak_mib > 0 for row in report.rows)
    assert set(report.findings["growth"]) == set(report.findings["memory_growth"]) == {"ravlt_nano plain float32"}


def test_detectors_are_refused():
    with pytest.raises(ValueError, match="Unknown framework 'mask_rcnn', expected one of semantic_fpn, upernet"):
        Options(framework="mask_rcnn")
