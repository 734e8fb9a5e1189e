"""`linvit bench streaming` on a small network."""

import pytest
import torch

from linvit.bench import streaming
from linvit.bench.kinds import measure
from linvit.bench.streaming import Noise, Options


def test_both_are_measured_and_agree(monkeypatch):
    monkeypatch.setattr(streaming, "memory", lambda device: streaming.BYTES_PER_PIXEL * 80**2)
    report = measure("streaming", names=("mavit_nano",), sides=(64, 96))
    rows = {(row.size[0], row.variant): row for row in report.rows}
    assert rows[96, "plain"].skipped == "needs about 0 GiB of memory, this machine has 0"
    assert all(row.median_ms > 0 for row in report.rows if row.skipped is None)
    assert rows[64, "streamed"].error < 1e-5
    assert rows[64, "streamed"].ratio > 0
    assert rows[96, "streamed"].error is None
    assert set(report.findings["growth"]) == {"mavit_nano streamed float32"}


def test_a_process_that_is_killed_leaves_a_row_that_says_so(monkeypatch):
    computed = streaming.in_new_process

    def killed(function, options, name, side, variant):
        if variant == streaming.PLAIN:
            raise MemoryError
        return computed(function, options, name, side, variant)

    monkeypatch.setattr(streaming, "in_new_process", killed)
    plain, streamed = measure("streaming", names=("mavit_nano",), sides=(64,)).rows
    assert plain.skipped == "the process was killed, often because memory runs out"
    assert (streamed.skipped, streamed.ratio) == (None, None)
    assert streamed.median_ms > 0


def test_noise_has_the_same_rows_however_it_is_read():
    noise = Noise(70, seed=1)
    assert torch.equal(torch.cat([noise.read(0, 33), noise.read(33, 70)], 2), noise.read(0, 70))


def test_sides_in_range():
    with pytest.raises(ValueError, match=r"`sides` is \(31,\), expected a list of whole numbers from 32 to 65,536"):
        Options(sides=(31,))
