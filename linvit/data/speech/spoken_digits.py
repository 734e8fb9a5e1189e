"""Digits spoken by espeak-ng, in LibriSpeech's layout: synthetic speech that needs no download.

Each voice is an accent with a timbre; training and validation voices have different timbres.
"""

import io
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path

import numpy as np

from linvit.data.speech.audio import resampled
from linvit.errors import SettingError
from linvit.files import check_writable
from linvit.ranges import Count, Seed, check

RATE = 16_000
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
SHORTEST, LONGEST = 2, 5  # words
VOICES = {
    "train": [
        f"{accent}+{timbre}"
        for accent in ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
        for timbre in ("m1", "m3", "f2", "f4")
    ],
    "val": ["en-us+m7", "en-gb+f1", "en-us+f3"],
}
PROGRAM = "espeak-ng"


def espeak() -> str:
    """The path of espeak-ng."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ValueError(
            f"{PROGRAM}, which speaks the digits, is not installed: install it with your system's package manager, on"
            f" Debian or Ubuntu with `apt-get install {PROGRAM}`."
        )
    return program


def make_speech(folder: str, train: int = 900, val: int = 120, seed: int = 0) -> Iterator[Path]:
    """Writes FOLDER/train and FOLDER/val as 16-bit wav at 16 kHz, and yields the path of each utterance it has written.

    Args:
        folder: a new or empty folder.
        train, val: number of utterances per split; the voices of a split take turns.
        seed: of digits, speeds (130 to 190 words per minute) and pitches (30 to 70 of 99).

    The same arguments produce the same files with the same version of espeak-ng. If stopped, it deletes its files.

    Raises:
        ValueError: if espeak-ng is not installed or fails, the folder is not empty, or a number is below 1.
        OSError: for a folder that cannot be written.
    """
    check({"seed": Seed, "train": Count, "val": Count}, {"seed": seed, "train": train, "val": val})
    program = espeak()
    target = Path(folder)
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise SettingError(f"{target} is not an empty folder: choose a new one.")
    check_writable(target)
    spoken = [
        _Spoken(target, split, number, seed)
        for split, count in (("train", train), ("val", val))
        for number in range(count)
    ]
    try:
        with ThreadPoolExecutor() as pool:
            yield from pool.map(lambda utterance: utterance.write(program), spoken)
    except BaseException:  # Ctrl-C too: an incomplete folder would block the next attempt
        for split in VOICES:
            shutil.rmtree(target / split, ignore_errors=True)
        raise
    for split in VOICES:
        utterances = [utterance for utterance in spoken if utterance.split == split]
        for chapter, members in groupby(sorted(utterances, key=lambda u: u.path), key=lambda u: u.path.parent):
            lines = [f"{utterance.path.stem} {utterance.text}\n" for utterance in members]
            speaker = chapter.parent.name
            (chapter / f"{speaker}-{chapter.name}.trans.txt").write_text("".join(lines), encoding="utf-8")


class _Spoken:
    """One utterance: voice, text, speed and pitch."""

    def __init__(self, folder: Path, split: str, number: int, seed: int) -> None:
        generator = np.random.default_rng([seed, list(VOICES).index(split), number])
        voices = VOICES[split]
        self.split, self.voice = split, voices[number % len(voices)]
        words = generator.integers(len(DIGITS), size=generator.integers(SHORTEST, LONGEST + 1))
        self.text = " ".join(DIGITS[word] for word in words)
        self.speed, self.pitch = generator.integers(130, 191), generator.integers(30, 71)
        speaker = f"{list(VOICES).index(split) + 1}{number % len(voices):02d}"
        self.path = folder / split / speaker / "1" / f"{speaker}-1-{number:04d}.wav"

    def write(self, program: str) -> Path:
        import soundfile

        asked = ["-v", self.voice, "-s", str(self.speed), "-p", str(self.pitch), "--stdout", self.text.lower()]
        done = subprocess.run([program, *asked], capture_output=True)
        if done.returncode or not done.stdout:
            reason = done.stderr.decode(errors="replace").strip().splitlines() or ["without a reason"]
            raise ValueError(
                f"{program} did not speak with the voice {self.voice} ({reason[0].rstrip('.')}): reinstall it with"
                " all of its voices."
            )
        wav = bytearray(done.stdout)  # its 44 bytes of header, written to a pipe, do not contain the lengths
        wav[4:8] = (len(wav) - 8).to_bytes(4, "little")
        wav[40:44] = (len(wav) - 44).to_bytes(4, "little")
        samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(self.path, resampled(samples, rate, RATE), RATE, subtype="PCM_16")
        return self.path
