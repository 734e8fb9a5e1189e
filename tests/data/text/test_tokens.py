import json
import re

import pytest
import torch

from linvit.data.text.source import pack
from linvit.data.text.tokens import IGNORED, Bytes, Rows, join, open_tokenizer

TEXTS = ["naïve  Rauch, 煙 and\n\ttabs".encode(), b"", b"one two one"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `language` is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    made.train_from_iterator(["one two one two Rauch and tabs"] * 9, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def test_bytes_and_back():
    for text in TEXTS:
        assert Bytes().decode([256, *Bytes().encode(text), 256]) == text.decode()
        assert sum(Bytes().widths(text)) == len(text)


def test_a_tokenizer_s_tokens_add_up_to_the_text(trained):
    tokenizer = open_tokenizer(str(trained))
    assert (tokenizer.vocabulary, tokenizer.separator) == (tokenizer.tokenizer.get_vocab_size(), 0)
    for text in TEXTS:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text.decode()
        assert len(tokenizer.widths(text)) == len(tokens)
        assert sum(tokenizer.widths(text)) == len(text)
    assert [list(found) for found in tokenizer.encode_batch(TEXTS)] == [list(tokenizer.encode(t)) for t in TEXTS]
    assert open_tokenizer(str(trained.parent)).encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])


@pytest.mark.parametrize(
    "stored",
    [
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {"padding": dict.fromkeys(("pad_id", "pad_type_id"), 0) | {
            "strategy": {"Fixed": 40}, "direction": "Right", "pad_to_multiple_of": None, "pad_token": "</s>"
        }},
        {"dropout": 0.5},
    ],
)  # fmt: skip
def test_truncation_padding_and_dropout_of_a_stored_tokenizer_are_off(trained, tmp_path, stored):
    about = json.loads(trained.read_text())
    about["model"].update({name: value for name, value in stored.items() if name in about["model"]})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(about | {name: value for name, value in stored.items() if name in about}))
    plain, tokenizer = open_tokenizer(str(trained)), open_tokenizer(str(path))
    texts = [b"one", TEXTS[0] * 9]
    assert [list(found) for found in tokenizer.encode_batch(texts)] == [list(plain.encode(text)) for text in texts]
    stream = join(texts, tokenizer)
    assert stream.tokens.tolist() == join(texts, plain).tokens.tolist()
    assert int(stream.widths.sum()) == sum(map(len, texts))
    assert len(stream.widths) == len(stream.tokens)
    assert tokenizer.fingerprint() == plain.fingerprint()


def test_a_separator_that_a_text_spells_is_text(trained):
    for tokenizer in (open_tokenizer(str(trained)), Bytes()):
        stream = join([b"one</s>two", b"one"], tokenizer)
        assert (stream.tokens == tokenizer.separator).sum() == 3
        assert tokenizer.decode(stream.tokens) == "one</s>twoone"


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("one two", None),
        ("one кот", r"6 of the 10 bytes of the held-out text \(60.00%\), most often 'к', 'о', 'т'"),
        ("ONE two", r"3 of the 7 bytes of the held-out text \(42.86%\), most often 'O', 'N', 'E'"),
        ("one two" * 4000 + "é", None),
    ],
)
def test_text_that_has_no_tokens_is_counted(tmp_path, text, share, caplog):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `language` is not installed")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer, made.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=30, special_tokens=["</s>"])
    made.train_from_iterator(["one two"], trainer)
    made.save(str(tmp_path / "latin.json"))
    tokenizer = open_tokenizer(str(tmp_path / "latin.json"))
    join([text.encode()], tokenizer, measures=False)
    assert not caplog.text
    join([text.encode()], tokenizer)
    assert re.search(share, caplog.text) if share else not caplog.text
    caplog.clear()
    pack([text.encode()], tokenizer, tmp_path / "val.tokens", measures=True)
    about = json.loads((tmp_path / "val.json").read_text())
    assert re.search(share, about["lost"]) if share else "lost" not in about


def test_bytes_that_are_no_utf8_are_counted_as_they_are(trained):
    tokenizer = open_tokenizer(str(trained))
    for text in (b"caf\xe9 \xff\xfe", b"cut \xe7\x85", "a real \ufffd".encode()):
        assert sum(tokenizer.widths(text)) == len(text)
        assert len(tokenizer.widths(text)) == len(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(b"caf\xe9 \xff\xfe")) == "caf\ufffd \ufffd\ufffd"


def word_level(path, known):
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))
    return open_tokenizer(str(path))


def test_numbers_of_tokens_may_have_gaps_and_a_token_may_stand_for_much(trained, tmp_path):
    tokenizer = word_level(tmp_path / "words.json", {"[UNK]": 0, "</s>": 1, "one": 900})
    assert tokenizer.vocabulary == 901
    stream = join([b"one " + b"x" * 70_000], tokenizer)
    assert stream.tokens.tolist() == [1, 900, 0, 1]
    assert int(stream.widths.sum()) == 70_004


def test_a_tokenizer_is_told_apart_by_what_it_does(trained, tmp_path):
    copied = tmp_path / "copied.json"
    copied.write_bytes(trained.read_bytes())
    other = word_level(tmp_path / "words.json", {"[UNK]": 0, "</s>": 1})
    assert open_tokenizer(str(copied)).fingerprint() == open_tokenizer(str(trained)).fingerprint()
    assert len({other.fingerprint(), open_tokenizer(str(trained)).fingerprint(), Bytes().fingerprint()}) == 3


def test_every_next_token_is_a_target_once_and_documents_stay_apart():
    stream = join(TEXTS, Bytes())
    rows = Rows(stream, 8, 256, keeps_apart=True)
    read = [rows[index] for index in range(len(rows))]
    targets = torch.cat([about["targets"] for _, about in read])
    tokens = torch.cat([row for row, _ in read])
    known = targets != IGNORED
    assert targets[known].tolist() == stream.tokens[1:].tolist()
    assert tokens[known].tolist() == stream.tokens[:-1].tolist()
    assert sum(int(about["bytes"]) for _, about in read) == sum(map(len, TEXTS))
    for row, about in read:
        starts = about["documents"].diff() != 0
        assert (row[1:][starts] == 256).all()
        assert (about["targets"] != IGNORED).sum() == 8 or about["documents"][-1] == 8
    together = Rows(stream, 8, 256, keeps_apart=False)
    assert not any(together[index][1]["documents"].any() for index in range(len(together)))
