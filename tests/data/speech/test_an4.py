import shutil

import numpy as np
import pytest
import soundfile
from tiny_speech import RATE, tone, write_an4

from linvit.data.speech import AN4
from linvit.data.speech.audio import CorruptAudioError, read_audio

TRAIN = {f"sp{number}": ["LOW HIGH", "MID"] for number in range(10)}
TEST = {"fcaw": ["HIGH", "MID LOW"]}


@pytest.fixture(scope="module")
def an4(tmp_path_factory):
    return write_an4(tmp_path_factory.mktemp("an4"), TRAIN, TEST)


@pytest.fixture
def copied(an4, tmp_path):
    return shutil.copytree(an4, tmp_path / "an4")


def source(root, **settings):
    return AN4(str(root), **{"units": "words", "mels": 16, "batch_size": 4, **settings})


def rewrite(root, text, split="test"):
    (root / "etc" / f"an4_{split}.transcription").write_text(text)


def test_training_and_official_test_utterances_are_read(an4):
    data = source(an4)
    assert [one.text for one in data.utterances("train")] == ["LOW HIGH", "MID"] * 10
    assert [(one.text, one.path.name) for one in data.utterances("val")] == [
        ("HIGH", "an0-fcaw-b.sph"),
        ("MID LOW", "an1-fcaw-b.sph"),
    ]
    assert data.class_names == ["<blank>", "▁HIGH", "▁LOW", "▁MID"]
    assert len(list(data.train_dataloader())) == 5
    assert data.found_in(an4) == {"name": "an4", "root": str(an4)}
    assert data.found_in(an4 / "wav") is None


def test_whole_speakers_are_held_out_of_training_to_tune_on(an4):
    data = source(an4, held_out=0.3)
    speakers = {split: {data.speaker(one.path) for one in data.utterances(split)} for split in ("train", "val")}
    assert len(speakers["val"]) == 3
    assert len(speakers["train"]) == 7
    assert speakers["train"] | speakers["val"] == set(TRAIN)


def test_fillers_and_numbers_of_pronunciations_are_no_words(copied):
    rewrite(copied, "\n<s> ++NOISE++ THE(2) CAT'S <sil> HAT </s> (an0-fcaw-b)\n")
    assert [one.text for one in source(copied).utterances("val")] == ["THE CAT'S HAT"]


def test_wrong_transcripts_end_in_a_sentence(copied):
    rewrite(copied, "GO")
    message = r"an4_test.transcription has the line 'GO', expected a text and a name in parentheses"
    with pytest.raises(ValueError, match=message):
        source(copied).utterances("val")


def test_a_name_is_found_in_either_form_of_unicode(copied):
    folder = copied / "wav" / "an4test_clstk" / "fcaw"
    (folder / "an0-fcaw-b.sph").rename(folder / "\u00e9.sph")
    rewrite(copied, "GO (e\u0301)")
    assert source(copied).utterances("val")[0].path.name == "\u00e9.sph"
    rewrite(copied, "GO (e\u0301)\nNO (\u00e9)")
    with pytest.raises(ValueError, match="has two lines for the utterance"):
        source(copied).utterances("val")


def test_what_is_found_twice_is_named(copied):
    folder = copied / "wav" / "an4test_clstk" / "fcaw"
    shutil.copy(folder / "an0-fcaw-b.sph", folder / "an0-fcaw-b.wav")  # the same sound in another format
    assert source(copied).utterances("val")[0].path.suffix == ".sph"
    shutil.copy(folder / "an0-fcaw-b.sph", copied / "wav")
    with pytest.raises(ValueError, match=r"has the name of .*: remove one of them"):
        source(copied).utterances("val")
    shutil.copy(copied / "etc" / "an4_test.transcription", copied / "etc" / "b_test.transcription")
    with pytest.raises(ValueError, match=r"has 2 files named \*_test.transcription, expected one"):
        source(copied).utterances("val")


@pytest.mark.parametrize(("subtype", "step"), [("PCM_16", 2**-15), ("ULAW", 0.02)])
@pytest.mark.parametrize("endian", ["BIG", "LITTLE"])
def test_sphere_files_have_the_samples_that_were_written(subtype, step, endian, tmp_path):
    samples = tone("MID")
    soundfile.write(tmp_path / "a.sph", samples, RATE, subtype=subtype, format="NIST", endian=endian)
    assert np.abs(read_audio(tmp_path / "a.sph", RATE).numpy() - samples).max() <= step


def test_sphere_compressed_by_shorten_is_refused_by_its_name(tmp_path):
    fields = "sample_count -i 8000\nsample_rate -i 16000\nchannel_count -i 1\nsample_n_bytes -i 2\n"
    header = f"NIST_1A\n   1024\n{fields}sample_coding -s26 pcm,embedded-shorten-v2.00\nend_head\n"
    (tmp_path / "a.sph").write_bytes(header.encode().ljust(1024) + b"ajkg\2" + bytes(8000))
    with pytest.raises(CorruptAudioError, match=r"\(it is compressed as pcm,embedded-shorten-v2.00\)"):
        read_audio(tmp_path / "a.sph", RATE)
