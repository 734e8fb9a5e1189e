import itertools
import json

import numpy as np
import pytest

from linvit.data.text import HuggingFaceText
from linvit.data.text.tokens import join

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


def test_a_damaged_file_is_told_with_its_reason(asked, tmp_path):
    (tmp_path / "texts.jsonl").write_text("{damaged")
    with pytest.raises(ValueError, match=r"The data set json cannot be read \(JSON parse error: Missing"):
        HuggingFaceText(**asked).stream("train")


def test_packing_stops_at_max_tokens(asked):
    stream = HuggingFaceText(**asked, max_tokens=50).stream("train")
    assert stream.documents == 3
    assert len(stream.tokens) == sum(1 + len(text) for text in TEXTS[4:7]) + 1


def test_a_context_asks_for_no_other_file_but_a_tokenizer_does(asked, tmp_path):
    HuggingFaceText(**asked).stream("train")
    packed = set((tmp_path / "packed").iterdir())
    HuggingFaceText(**asked | {"context": 8}).stream("train")
    assert set((tmp_path / "packed").iterdir()) == packed
    tokenizers = pytest.importorskip("tokenizers")
    made = tmp_path / "tokenizer.json"
    for known in ({"[UNK]": 0, "</s>": 1}, {"[UNK]": 0, "</s>": 1, "document": 2}):
        tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]")).save(str(made))
        HuggingFaceText(**asked | {"tokenizer": str(made)}).stream("train")
    assert len(list((tmp_path / "packed").glob("*.tokens"))) == 3


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_without_text_is_named(asked, tmp_path, streaming):
    rows = [{"text": text if number != 7 else None} for number, text in enumerate(TEXTS)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = HuggingFaceText(**asked, streaming=streaming, epoch_rows=8)
    with pytest.raises(ValueError, match=r"a row whose 'text' is None, expected text: set `column`"):
        list(source.train_dataloader())


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


def test_a_stream_that_is_stopped_in_its_second_pass_and_stopped_again_goes_on_from_there(asked):
    def read(skipped, count):
        source = HuggingFaceText(**asked, streaming=True, epoch_rows=8)
        stream = source.train_dataloader().dataset  # the trainer may ask for it before the checkpoint is read
        source.load_state_dict({"reached": (0, 0), "documents": skipped})
        documents = list(itertools.islice(stream._documents(), count))
        return documents, source.state_dict()["documents"]

    whole, _ = read(0, 60)
    rest, reached = read(30, 20)
    assert rest == whole[30:50]
    assert reached == 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": None}, "`path` is null, expected text"),
        ({"streaming": True, "epoch_rows": 1}, "so each process gets 1 rows per epoch, fewer than one batch of 2"),
        ({"column": "body"}, "has no column 'body': set `column` to one of text"),
    ],
)
def test_what_cannot_be_read_is_refused(asked, arguments, message):
    with pytest.raises(ValueError, match=message):
        HuggingFaceText(**{**asked, **arguments}).train_dataloader()
