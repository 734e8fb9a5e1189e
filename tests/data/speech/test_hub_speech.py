import datasets
import pytest
import torch
import yaml
from tiny_speech import write_speech

from linvit.data.speech.hub import HuggingFaceSpeech
from linvit.data.speech.librispeech import LibriSpeech
from linvit_cli import main


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return write_speech(tmp_path_factory.mktemp("speech"), train=4, val=2)


@pytest.fixture(scope="module")
def files(speech, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    for part in ("train", "val"):
        utterances = LibriSpeech(str(speech)).utterances(part)
        sounds = [{"bytes": one.path.read_bytes(), "path": one.path.name} for one in utterances]
        rows = datasets.Dataset.from_dict({"audio": sounds, "text": [one.text for one in utterances]})
        rows.to_parquet(str(folder / f"{part}.parquet"))
    return {part: str(folder / f"{part}.parquet") for part in ("train", "val")}


def hub(files, **settings):
    arguments = {"options": {"data_files": files}, "val": ["val"], "units": "words", "mels": 16, "batch_size": 2}
    return HuggingFaceSpeech("parquet", **arguments | settings)


def test_its_utterances_are_those_of_the_same_files(files, speech):
    ours, theirs = hub(files).val_set(), LibriSpeech(str(speech), units="words", mels=16).val_set()
    for index in range(2):
        assert torch.equal(ours[index][0], theirs[index][0])
        assert ours[index][1]["text"] == theirs[index][1]["text"]
    features, targets = next(iter(hub(files).train_dataloader()))
    assert len(features) == len(targets["texts"]) == 2


def test_an_utterance_without_text_or_sound_is_named(files, speech, tmp_path):
    sound = {"bytes": LibriSpeech(str(speech)).utterances("val")[0].path.read_bytes(), "path": "a.wav"}
    for text, kept in ((None, sound), ("LOW", None)):
        rows = datasets.Dataset.from_dict({"audio": [sound, kept], "text": ["LOW", text]})
        rows.to_parquet(str(tmp_path / f"{text}.parquet"))
    with pytest.raises(ValueError, match=r"Utterance 1 of split val has None in the column 'text'"):
        hub({"train": files["train"], "val": str(tmp_path / "None.parquet")}).val_set()
    assert "has no sound" in hub({"train": files["train"], "val": str(tmp_path / "LOW.parquet")}).val_set()[1]


def test_a_recipe_sets_the_arguments_of_librispeech_but_for_its_files(tmp_path, capsys):
    recipe = tmp_path / "mine.yaml"
    data = "{name: huggingface_speech, path: mine, units: words, max_corrupt: 3}"
    recipe.write_text(f"model: {{name: conformer_nano}}\ntask: {{name: speech}}\ndata: {data}\n")
    assert main(["train", str(recipe), "--print_config"]) == 0
    read = yaml.safe_load(capsys.readouterr().out)["data"]
    assert (read["units"], read["max_corrupt"], read["batch_size"]) == ("words", 3, 16)
    assert not {"groups", "root", "kwargs"} & set(read)
