import sys

import pytest
import torch

from linvit.bench import decoding
from linvit.models.registry import create
from linvit.models.sequence import DecoderCache


@pytest.fixture(scope="module")
def points():
    return decoding.measure(contexts=(64, 256), tokens=2, rounds=1)


def test_memory_of_linear_mechanisms_is_that_of_any_context_and_softmax_s_grows_with_it(points):
    memory = {(point.mechanism, point.context): point.memory for point in points}
    for mechanism in ("linear", "mala", "rala"):
        assert memory[mechanism, 64] == memory[mechanism, 256]
    assert memory["softmax", 256] - memory["softmax", 64] == 4 * 2 * 128 * 4 * (256 - 64)  # layers, k and v, width
    assert all(point.seconds > 0 for point in points)


@torch.inference_mode()
def test_a_filled_cache_has_the_size_of_one_that_was_read():
    network = create("sequence_nano", decoding.VOCABULARY, mechanism="softmax")
    memory = DecoderCache()
    network.read(torch.zeros(1, 40, dtype=torch.long), memory)
    assert decoding.filled(network, 40).num_bytes() == memory.num_bytes()


def test_the_command_writes_table_and_figure(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "decoding.svg"
    monkeypatch.setattr(decoding, "measure", lambda model, contexts: decoding_points(contexts))
    monkeypatch.setattr(sys, "argv", ["decoding", str(figure), "--contexts", "64", "128"])
    decoding.main()
    assert "| 128 | mala | 500 | 2.00× | 1.00 MiB |" in capsys.readouterr().out
    assert "<svg" in figure.read_text()


def decoding_points(contexts):
    seconds = {"softmax": 0.004, "mala": 0.002}
    return [
        decoding.Point(mechanism, context, seconds[mechanism], 2**20) for context in contexts for mechanism in seconds
    ]
