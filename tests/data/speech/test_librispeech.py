import shutil

import numpy as np
import pytest
import torch
from tiny_speech import write_speech

from linvit.data.speech.librispeech import LibriSpeech, SpeechFolder, Speller, find_utterances, tokens_of

TEXTS = ["THE CAT SAT", "THE HAT", "A CAT'S HAT"]


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return write_speech(tmp_path_factory.mktemp("speech"))


def source(root, **settings):
    return LibriSpeech(str(root), **{"units": "words", "mels": 16, "batch_size": 4, **settings})


def test_librispeech_layout_is_read(speech):
    utterances = find_utterances(speech / "train")
    assert len(utterances) == 16
    assert {one.path.suffix for one in utterances} == {".flac", ".wav"}
    assert all(set(one.text.split()) <= {"LOW", "MID", "HIGH"} for one in utterances)


def test_features_have_mean_zero_and_deviation_one_over_the_training_part(speech):
    data = source(speech, bands=0, times=0)
    frames = torch.cat([data.train_set()[index][0] for index in range(16)])
    assert frames.mean(0).abs().max() < 1e-4
    assert (frames.std(0) - 1).abs().max() < 1e-4


def test_a_batch_is_padded_and_says_what_is_whose(speech):
    features, targets = next(iter(source(speech).train_dataloader()))
    assert features.shape == (4, int(targets["lengths"].max()), 16)
    for row, text in enumerate(targets["texts"]):
        assert int(targets["counts"][row]) == len(text.split())
        assert not features[row, targets["lengths"][row] :].any()


def test_masks_are_drawn_from_seed_epoch_and_utterance(speech):
    first, again, other = (
        torch.cat([x.flatten() for x, _ in source(speech, seed=seed).train_dataloader()]) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert first.shape != other.shape or not torch.equal(first, other)


def test_groups_put_utterances_of_similar_length_together(speech):
    def spread(groups):
        lengths = [t["lengths"].float() for _, t in source(speech, groups=groups).train_dataloader()]
        return float(torch.stack(lengths).std(1).mean())

    assert spread(4) < spread(1)


def test_an_unreadable_file_is_named_or_left_out(speech, tmp_path):
    shutil.copytree(speech, tmp_path / "speech")
    (tmp_path / "speech" / "train" / "7" / "3" / "7-3-0000.flac").write_bytes(b"no sound")
    with pytest.raises(ValueError, match=r"7-3-0000.flac cannot be read as sound"):
        list(source(tmp_path / "speech").train_dataloader())
    batches = list(source(tmp_path / "speech", max_corrupt=1).train_dataloader())
    assert sum(len(features) for features, _ in batches) == 15


def test_a_folder_to_measure_on_takes_tokens_and_features_from_the_network(speech):
    trained = source(speech)
    folder = SpeechFolder(str(speech / "train"), trained.class_names, trained.preprocessing)
    ours = [target["text"] for _, target in (folder.val_set()[index] for index in range(16))]
    assert ours == [utterance.text for utterance in trained.utterances("train")]


def test_units_spell_and_are_spelled_back():
    from linvit.tasks.transcription import spelled

    for units in ("words", "characters", "subwords"):
        names, tokenizer = tokens_of(TEXTS, units, 20)
        assert names[0] == "<blank>"
        speller = Speller(names, tokenizer)
        for text in TEXTS:
            tokens = speller(text)
            assert 0 not in tokens
            assert spelled(tokens, names) == text
    assert len(tokens_of(TEXTS, "subwords", 20)[0]) <= 20
    assert tokens_of(TEXTS, "words", 0)[0] == ["<blank>", "▁A", "▁CAT", "▁CAT'S", "▁HAT", "▁SAT", "▁THE"]


def test_what_no_token_stands_for_is_left_out():
    assert Speller(tokens_of(TEXTS, "words", 0)[0])("THE DOG SAT") == [6, 5]
    characters = tokens_of(TEXTS, "characters", 0)[0]
    assert len(Speller(characters)("DOT")) == 2


def test_statistics_are_those_of_evenly_spread_utterances(speech, monkeypatch):
    monkeypatch.setattr("linvit.data.speech.librispeech.MEASURED", 2)
    few = source(speech).preprocessing
    monkeypatch.undo()
    assert not np.allclose(few.mean, source(speech).preprocessing.mean)


def test_transcripts_are_read_however_they_are_spaced_and_in_utf8_alone(speech, tmp_path):
    shutil.copytree(speech / "val", tmp_path / "val")
    listed = tmp_path / "val" / "7" / "3" / "7-3.trans.txt"
    expected = find_utterances(tmp_path)
    text = listed.read_text()
    listed.write_text("\ufeff" + text.replace(" ", "\t", 1), encoding="utf-8")
    assert find_utterances(tmp_path) == expected
    listed.write_bytes(text.encode() + b"7-3-0000 CAF\xc9")
    with pytest.raises(ValueError, match=r"7-3\.trans\.txt is not text in UTF-8"):
        find_utterances(tmp_path)


def test_hidden_transcripts_and_sound_files_are_not_read(speech, tmp_path):
    shutil.copytree(speech / "val", tmp_path / "val")
    folder = tmp_path / "val" / "7" / "3"
    expected = find_utterances(tmp_path)
    for name in ("._7-3.trans.txt", "._7-3-0000.flac"):
        (folder / name).write_bytes(b"hidden")
    assert find_utterances(tmp_path) == expected


def test_a_folder_names_its_subsets(speech):
    names, preprocessing = source(speech).class_names, source(speech).preprocessing
    assert SpeechFolder(str(speech), names, preprocessing).subset_names() == ["train", "val"]
    assert SpeechFolder(str(speech / "val"), names, preprocessing).subset_names() == []


def test_the_layout_is_recognized_with_its_subsets(speech):
    assert LibriSpeech.found_in(speech) == {"name": "librispeech", "root": str(speech)}
    assert LibriSpeech.found_in(speech / "train") is None
