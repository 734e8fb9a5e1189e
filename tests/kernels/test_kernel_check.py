import pytest
import torch

from linvit.bench import gpu
from linvit.bench.rows import Progress
from linvit.ops import linear_attention


def few(monkeypatch):
    monkeypatch.setattr(gpu, "SHAPES", ((20, 16),))
    monkeypatch.setattr(gpu, "DTYPES", (torch.float32,))
    monkeypatch.setattr(gpu, "OPTIONS", {name: gpu.OPTIONS[name] for name in ("mala", "causal mala")})
    monkeypatch.setattr(gpu, "WORKS", {"interaction": gpu.WORKS["interaction"]})
    monkeypatch.setattr(gpu, "MAP", (1, 6, 5, 4))
    monkeypatch.setattr(gpu, "LAYERS", dict([next(iter(gpu.LAYERS.items()))]))


@pytest.mark.slow
def test_the_check_passes(device, monkeypatch):
    few(monkeypatch)
    found = gpu.checks(device, Progress())
    assert len(found) == 2 * len(gpu.OPTIONS) + 2
    assert [check.failure for check in found] == [None] * len(found)


def test_the_check_finds_a_wrong_kernel_and_one_that_breaks(device, monkeypatch):
    def wrong(query, key, value, **options):
        if options.get("causal"):
            raise RuntimeError("no causal kernel today")
        return 1.001 * linear_attention(query, key, value, **options)

    few(monkeypatch)
    monkeypatch.setattr(gpu, "KERNEL", wrong)
    plain = gpu.depthwise.plain
    monkeypatch.setattr(gpu.depthwise, "kernel", lambda work, given: 1.001 * plain(work, given))
    failures = {check.case: check.failure for check in gpu.checks(device, Progress())}
    assert failures["mala, float32, 20 tokens, width 16"].startswith("output: error 1.0e-03, allowed")
    assert failures["interaction, float32"].startswith("output: error 1.0e-03, allowed")
    assert failures["causal mala, same bits every time"] == "no causal kernel today"
