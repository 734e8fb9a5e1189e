"""The kinds of benchmarks of our pages, small: each is checked before it is timed, and has its table and files."""

import json
import math
import sys

import pytest
import torch

from evidence.__main__ import main
from evidence.bench import decoding, precision, sampling, segmentation, streaming
from evidence.bench.decoding import VOCABULARY, filled, step
from linvit.bench.exactness import WrongResultError
from linvit.bench.kinds import measure
from linvit.bench.machine import MEBIBYTE
from linvit.bench.page import cells
from linvit.models.by_name import create
from linvit.models.dit import DiT
from linvit.models.sequence import Decoder, DecoderCache

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the peak of a process can be reset on Linux only"
)


@pytest.mark.parametrize(
    ("arguments", "head", "count"),
    [
        (["decoding", "mala", "softmax", "--contexts", "16", "32", "--rounds", "1"], "kept MiB", 4),
        (["sampling", "--sides", "8", "16", "--rounds", "1"], "images/s, 50 steps", 4),
        (["precision", "mala", "--tokens", "49"], "ours / float32 math", 6),
    ],
)
def test_every_kind_gives_its_table_and_files(arguments, head, count, tmp_path, capsys):
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 0
    assert any(head in line for line in capsys.readouterr().out.splitlines())
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == count
    assert (tmp_path / "growth.svg").is_file() == (arguments[0] != "precision")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (lambda: decoding.Options(network="sequence_nono"), "sequence_nono"),
        (lambda: decoding.Options(names=("malla",)), "malla"),
        (lambda: decoding.Options(contexts=(0,)), "of 1 or more"),
        (lambda: sampling.Options(network="dit_nona_patch2"), "dit_nona_patch2"),
        (lambda: sampling.Options(sides=(16, 33)), "33"),
        (lambda: streaming.Options(sides=(31,)), "expected a list of whole numbers from 32 to 65,536"),
        (lambda: precision.Options(names=("linear",)), "Unknown operator 'linear', expected one of rala, mala"),
        (lambda: segmentation.Options(framework="mask_rcnn"), "expected one of semantic_fpn, upernet"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_is_timed(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        options()


@pytest.mark.slow
def test_memory_of_linear_mechanisms_is_that_of_any_context_and_that_of_softmax_grows_with_it():
    report = measure("decoding", contexts=(64, 256), rounds=1)
    rows = {(row.name, row.tokens): row for row in report.rows}
    for mechanism in ("linear", "mala", "rala"):
        assert rows[mechanism, 64].peak_mib == rows[mechanism, 256].peak_mib
        assert rows[mechanism, 64].against["softmax"] > 0
    grown = (rows["softmax", 256].peak_mib - rows["softmax", 64].peak_mib) * MEBIBYTE
    assert grown == 4 * 2 * 128 * 4 * (256 - 64)  # layers, k and v, width
    assert all(row.median_ms > 0 and 0 < row.error < 1e-4 for row in rows.values())
    assert "mala sequence_nano float32, token" in report.findings["growth"]


@torch.inference_mode()
@pytest.mark.parametrize("mechanism", ["softmax", "mala"])
def test_a_filled_cache_has_the_size_of_one_that_was_read_and_steps_leave_it_so(mechanism):
    network = create("sequence_nano", VOCABULARY, mechanism=mechanism)
    memory = DecoderCache()
    network.read(torch.zeros(1, 40, dtype=torch.long), memory)
    cache = filled(network, 40)
    call = step(network, cache)
    call()
    call()
    assert (cache.num_bytes(), cache.tokens) == (memory.num_bytes(), memory.tokens)


def test_a_wrong_step_or_pass_is_refused(monkeypatch):
    monkeypatch.setattr(Decoder, "forward", lambda self, tokens: torch.zeros(*tokens.shape, VOCABULARY))
    monkeypatch.setattr(decoding, "step", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match="a step of the decoder with softmax computes a wrong result"):
        measure("decoding", contexts=(64,), rounds=1)
    monkeypatch.setattr(DiT, "forward", lambda self, image, time, label: torch.rand_like(image))
    with pytest.raises(WrongResultError, match="softmax at 8 px computes a wrong result"):
        measure("sampling", sides=(8,), rounds=1)
    released = precision.OPERATORS["rala"][1]
    monkeypatch.setitem(precision.OPERATORS, "mala", (precision.OPERATORS["mala"][0], released))
    with pytest.raises(WrongResultError, match="the released mala computes a wrong result"):
        measure("precision", tokens=(49,))


@pytest.mark.slow
def test_mechanisms_of_a_dit_are_checked_and_timed_side_by_side():
    rows = measure("sampling", sides=(8, 16), rounds=1, memory=True).rows
    shapes = [(16, (8, 8)), (64, (16, 16))]
    expected = [(name, *shape) for shape in shapes for name in ("softmax", "mala")]
    assert [(row.name, row.tokens, row.size) for row in rows] == expected
    assert all(row.median_ms > 0 and 0 < row.error < 1e-5 for row in rows)
    assert rows[1].against["softmax"] > 0


def test_streamed_and_ordinary_logits_agree(monkeypatch):
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
    noise = streaming.Noise(70, seed=1)
    assert torch.equal(torch.cat([noise.read(0, 33), noise.read(33, 70)], 2), noise.read(0, 70))


def test_released_arrangements_compute_the_same_in_float64():
    query, key, value = torch.randn(3, 1, 2, 60, 16, dtype=torch.float64)
    for ours, released in precision.OPERATORS.values():
        torch.testing.assert_close(released(query, key, value), ours(query, key, value), rtol=1e-11, atol=1e-12)


def test_ours_stays_finite_where_the_released_rala_overflows():
    report = measure("precision", tokens=(3136,))
    rows = {(row.name, row.variant, row.dtype): row for row in report.rows}
    assert math.isinf(rows["rala", "deviation 16", "float16"].errors["released"])
    for row in rows.values():
        assert row.error <= 1.5 * row.errors["returned in dtype"]
        assert row.errors["float32 math"] < row.error < row.errors["released"]
    shown = cells(report)
    assert len(shown) == 12
    assert "not finite" in {row["released"] for row in shown}


@on_linux
def test_a_segmentor_is_measured_with_its_pattern_and_both_exponents():
    report = measure("memory", names=("ravlt_nano",), sizes=((64, 64), (64, 128)), rounds=1)
    assert [(row.size, row.pattern) for row in report.rows] == [((64, 64), "LLLL"), ((64, 128), "LLLL")]
    assert all(row.median_ms > 0 and row.peak_mib > 0 for row in report.rows)
    assert set(report.findings["growth"]) == set(report.findings["memory_growth"]) == {"ravlt_nano plain float32"}
