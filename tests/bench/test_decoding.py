"""`linvit bench decoding` after a few tokens."""

import pytest
import torch

from linvit.bench import decoding
from linvit.bench.checks import WrongResultError
from linvit.bench.decoding import VOCABULARY, Options, filled, measure, step
from linvit.bench.memory import MEBIBYTE
from linvit.bench.progress import Progress
from linvit.bench.rows import Report
from linvit.models.registry import create
from linvit.models.sequence import Decoder, DecoderCache


def measured(**options):
    report = Report("decoding")
    measure(Options(**{"contexts": (64, 256), "rounds": 1, **options}), report, Progress())
    return report


def test_memory_of_linear_mechanisms_is_that_of_any_context_and_that_of_softmax_grows_with_it():
    rows = {(row.name, row.tokens): row for row in measured().rows}
    for mechanism in ("linear", "mala", "rala"):
        assert rows[mechanism, 64].peak_mib == rows[mechanism, 256].peak_mib
        assert rows[mechanism, 64].against["softmax"] > 0
    grown = (rows["softmax", 256].peak_mib - rows["softmax", 64].peak_mib) * MEBIBYTE
    assert grown == 4 * 2 * 128 * 4 * (256 - 64)  # layers, k and v, width
    assert all(row.median_ms > 0 and 0 < row.error < 1e-4 for row in rows.values())


def test_time_has_an_exponent():
    growth = measured(names=("mala",)).findings["growth"]
    assert list(growth) == ["mala sequence_nano float32, token"]


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


def test_a_step_that_differs_from_the_forward_pass_is_refused(monkeypatch):
    monkeypatch.setattr(Decoder, "forward", lambda self, tokens: torch.zeros(*tokens.shape, VOCABULARY))
    monkeypatch.setattr(decoding, "step", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongResultError, match="a step of the decoder with softmax computes a wrong result"):
        measured()


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="sequence_nono"):
        Options(network="sequence_nono")
    with pytest.raises(ValueError, match="malla"):
        Options(names=("malla",))
    with pytest.raises(ValueError, match="of 1 or more"):
        Options(contexts=(0,))
