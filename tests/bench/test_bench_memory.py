"""Peaks of calls whose memory is known."""

import os
import sys

import pytest
import torch

from linvit.bench.machine import in_new_process, peak_of

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the peak of a process can be reset on Linux only"
)


def build_sum(mebibytes):
    x = torch.ones(mebibytes * 2**18)
    return lambda: (x + 1).sum()


def killed():
    os.kill(os.getpid(), 9)


@on_linux
def test_peak_is_what_the_call_makes_above_its_inputs():
    assert peak_of(build_sum, 64) == pytest.approx(64, abs=6)


def test_a_killed_process_is_reported():
    with pytest.raises(MemoryError, match="killed"):
        in_new_process(killed)
    assert peak_of(killed) is None
