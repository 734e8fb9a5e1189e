import itertools
import json

import numpy as np
import pytest

from linvit.data import HuggingFaceText
from linvit.data.tokens import join

pytest.importorskip("datasets", reason="the extra `language` is not installed")
TEXTS = [f"document {number} says {number * number}" for number in range(30)]


@pytest.fixture
def asked(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lines = "\n".join(json.dumps({"text": text}) for text in TEXTS)
    (tmp_path / "texts.jsonl").write_text(lines)
    return {
        "path": "json",
        "tokenizer": "bytes",
        "options": {"data_files": str(tmp_path / "texts.jsonl"), "cache_dir": str(tmp_path / "cache")},
        "cache": str(tmp_path / "packed"),
        "context": 16,
        "batch_size": 2,
        "val_documents": 4,
    }


def test_documents_are_packed_once_and_read_from_the_file(asked, tmp_path):
    source = HuggingFaceText(**asked)
    expected = join((text.encode() for text in TEXTS[4:]), source.tokenizer)
    found = source.stream("train")
    assert np.array_equal(found.tokens, expected.tokens)
    assert found.documents == 26
    held_out = source.stream("val")
    assert np.array_equal(held_out.widths, join((text.encode() for text in TEXTS[:4]), source.tokenizer).widths)
    (tmp_path / "texts.jsonl").unlink()
    assert np.array_equal(HuggingFaceText(**asked).stream("train").tokens, expected.tokens)
    assert not list((tmp_path / "packed").glob(".*.tmp"))


def test_packing_stops_at_max_tokens(asked):
    assert HuggingFaceText(**asked, max_tokens=1).stream("train").documents == 26  # a group of 256 at once


def test_a_stream_gives_every_document_and_goes_on_after_those_read(asked):
    source = HuggingFaceText(**asked, streaming=True, epoch_rows=8)

    def tokens_of(stream, epochs):
        rows = [row for _ in range(epochs) for row in stream]
        return [token for row, _ in rows for token in row.tolist()]

    loader = source.train_dataloader()
    first = tokens_of(loader.dataset, 6)
    text = "".join("|" if token == 256 else chr(token) for token in first)
    assert len(first) == 6 * 8 * 16
    assert set(text.strip("|").split("|")[:26]) <= set(TEXTS[4:])
    assert source.state_dict()["documents"] >= 26
    again = HuggingFaceText(**asked, streaming=True, epoch_rows=8)
    again.load_state_dict({"reached": (0, 0), "documents": 20})
    rest = list(itertools.islice(again.train_dataloader().dataset._documents(), 6))
    assert len(set(rest)) == 6
    assert {one.decode() for one in rest} | set(text.split("|")[1:21]) == set(TEXTS[4:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, "names no data set: set data.path"),
        ({"tokenizer": None}, "names no tokenizer: set data.tokenizer"),
        ({"streaming": True, "num_workers": 2}, "data.num_workers is 2"),
        ({"column": "body"}, "has the columns text: set data.column"),
        ({"train_split": "nowhere"}, "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(asked, arguments, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceText(**{**asked, **arguments}).stream("train")
