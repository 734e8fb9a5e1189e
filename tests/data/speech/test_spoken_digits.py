import shutil

import pytest
import soundfile

from linvit.data.speech.librispeech import find_utterances
from linvit.data.speech.spoken_digits import DIGITS, VOICES, make_speech
from linvit_cli import main

needs_espeak = pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")


@needs_espeak
def test_utterances_are_spoken_in_librispeechs_layout_and_are_the_same_again(tmp_path, capsys):
    assert main(["data", "make-speech", str(tmp_path / "a"), "--train", "18", "--val", "4"]) == 0
    assert "22 utterances" in capsys.readouterr().out
    list(make_speech(str(tmp_path / "b"), 18, 4))
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.*") if path.is_file())
    assert all((tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes() for file in files)
    train, val = (find_utterances(tmp_path / "a" / part) for part in ("train", "val"))
    assert (len(train), len(val)) == (18, 4)
    for one in (*train, *val):
        assert 2 <= len(one.text.split()) <= 5
        assert set(one.text.split()) <= set(DIGITS)
        samples, rate = soundfile.read(one.path)
        assert rate == 16_000
        assert 0.2 < len(samples) / rate / len(one.text.split()) < 1.2
        assert abs(samples).max() > 0.1
    assert {one.path.parts[-3] for one in train}.isdisjoint(one.path.parts[-3] for one in val)


def test_no_timbre_is_on_both_sides():
    timbres = {part: {voice.partition("+")[2] for voice in voices} for part, voices in VOICES.items()}
    assert timbres["train"].isdisjoint(timbres["val"])


def test_without_the_program_it_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["data", "make-speech", str(tmp_path / "a")]) == 2
    assert "espeak-ng, which speaks the digits, is not installed: install it" in capsys.readouterr().err
    assert main(["data", "make-speech", str(tmp_path / "a"), "--seed", "-1"]) == 2
    assert "--seed is -1, expected a whole number from 0 to 4,294,967,295" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("says", ["echo no such voice >&2; exit 1", "exit 0"])
def test_a_program_that_does_not_speak_is_named(says, tmp_path, monkeypatch, capsys):
    mute = tmp_path / "mute"
    mute.write_text(f"#!/bin/sh\n{says}\n")
    mute.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(mute))
    assert main(["data", "make-speech", str(tmp_path / "a"), "--train", "1", "--val", "1"]) == 2
    said = capsys.readouterr().err
    assert "did not speak with the voice en-us+m1" in said
    assert len(said.splitlines()) == 1
    assert not any((tmp_path / "a").iterdir())


@needs_espeak
def test_a_stopped_command_leaves_no_half_filled_folder(tmp_path):
    made = make_speech(str(tmp_path / "a"), 18, 4)
    assert next(made).is_file()
    made.close()
    assert not any((tmp_path / "a").iterdir())
