"""Recipes of Conformers that train in seconds on words that are tones, in LibriSpeech's layout."""

from pathlib import Path

import numpy as np
import soundfile
from tiny_run import write_merged

TONES = {"LOW": 300, "MID": 900, "HIGH": 2700}
RATE = 16_000
SIZES = {"mels": 16, "width": 16, "depth": 1, "heads": 2, "kernel": 5, "dropout": 0.0}


def tone(word: str, seconds: float = 0.12, rate: int = RATE) -> np.ndarray:
    """A word, and half as long a silence, with a little noise."""
    time = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(len(word)).normal(scale=1e-3, size=round(1.5 * seconds * rate))
    noise[: len(time)] += 0.3 * np.sin(2 * np.pi * TONES[word] * time)
    return noise.astype(np.float32)


def say(path: Path, text: str, rate: int = RATE) -> Path:
    """Writes the words as one sound file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, np.concatenate([tone(word, rate=rate) for word in text.split()]), rate)
    return path


def write_speech(folder: Path, train: int = 16, val: int = 6) -> Path:
    """train/ and val/ with utterances of one to three words, flac and wav."""
    for part, count in (("train", train), ("val", val)):
        drawn = np.random.default_rng(count)
        lines = []
        for number in range(count):
            text = " ".join(drawn.choice(list(TONES), size=drawn.integers(1, 4)))
            name = f"7-3-{number:04d}"
            say(folder / part / "7" / "3" / f"{name}.{('flac', 'wav')[number % 2]}", text)
            lines.append(f"{name} {text}\n")
        (folder / part / "7" / "3" / "7-3.trans.txt").write_text("".join(lines))
    return folder


def write_an4(folder: Path, train: dict[str, list[str]], test: dict[str, list[str]]) -> Path:
    """AN4's layout with these texts by speaker: SPHERE files, and transcripts with silence at both ends in training."""
    (folder / "etc").mkdir(parents=True)
    for split, texts, subset in (("train", train, "an4_clstk"), ("test", test, "an4test_clstk")):
        lines = []
        for speaker, spoken in texts.items():
            for number, text in enumerate(spoken):
                name = f"an{number}-{speaker}-b"
                path = folder / "wav" / subset / speaker / f"{name}.sph"
                path.parent.mkdir(parents=True, exist_ok=True)
                samples = np.concatenate([tone(word) for word in text.split()])
                soundfile.write(
                    path, samples, RATE, subtype="PCM_16", format="NIST", endian=("BIG", "LITTLE")[number % 2]
                )
                lines.append(f"<s> {text} </s> ({name})\n" if split == "train" else f"{text} ({name})\n")
        (folder / "etc" / f"an4_{split}.transcription").write_text("".join(lines))
    return folder


def write_speech_recipe(folder: Path, mechanism: str = "mala", **groups) -> Path:
    """Three epochs of four batches on write_speech, as folder/tiny.yaml; the run goes to folder/run."""
    speech = folder / "speech"
    values = {
        "folder": str(folder / "run"),
        "seed": 1,
        "model": {"name": "conformer_nano", "mechanism": mechanism, **SIZES},
        "task": {"name": "speech", "ema_decay": 0.5},
        "optimizer": {"lr": 1e-2},
        "data": {
            "name": "librispeech",
            "root": str(speech if speech.is_dir() else write_speech(speech)),
            "units": "words",
            "mels": 16,
            "batch_size": 4,
            "band_width": 2,
            "times": 1,
        },
        "trainer": {"max_epochs": 3, "accelerator": "cpu"},
    }
    return write_merged(folder / "tiny.yaml", values, groups)
