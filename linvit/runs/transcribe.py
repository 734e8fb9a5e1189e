"""`linvit predict` of a run that hears speech: what is said in sound files, on the screen or as CSV or JSON."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn

from linvit.data.speech.audio import CorruptAudioError, read_audio
from linvit.data.speech.librispeech import SUFFIXES
from linvit.files import check_writable, replacing
from linvit.runs.predict import find_files, ready_network
from linvit.runs.restore import Restored
from linvit.runs.screen import show as show_table
from linvit.tasks import Speech
from linvit.tasks.speech import known_beam
from linvit.tasks.transcription import spelled


def set_decoding(
    restored: Restored, beam: int | None, language_model: str | None = None, weight: float = 0.5, bonus: float = 0.0
) -> None:
    """How texts are found from here on: with a beam, and a language model of words, see prefix_beam.

    Raises ValueError for a beam below 1, a language model without a beam, either for a transducer, and as NGram.
    """
    task = restored.task
    if beam is not None:
        task.beam = known_beam(beam, task.network, "--beam")
    if language_model is not None:
        if task.beam == 1:
            raise ValueError("--lm needs a beam: give --beam 16, for example.")
        from linvit.tasks.n_gram import NGram

        task.decoding = {
            "names": restored.class_names,
            "language_model": NGram(language_model),
            "weight": weight,
            "bonus": bonus,
        }


def transcribe(
    restored: Restored, paths: Sequence[str | Path], weights: str | None = None
) -> tuple[list[tuple[str, str]], list[str]]:
    """(path, text) of sound files and of those in folders, and the sentences about files that cannot be read.

    Sound of another sampling rate is resampled, channels are averaged. Each file is heard by itself; how it is decoded
    is the task's, see set_decoding. Raises ValueError where none of the paths holds a sound file.
    """
    network, device = ready_network(restored, weights)
    preprocessing = restored.preprocessing
    told: list[tuple[str, str]] = []
    complaints: list[str] = []
    for path in _found(paths, complaints):
        try:
            features = preprocessing.features(read_audio(path, preprocessing.rate))
        except CorruptAudioError as error:
            complaints.append(str(error))
            continue
        pieces = _pieces(restored.task, network, features[None].to(device))
        told.append((str(path), spelled(pieces, restored.class_names)))
    return told, complaints


def _found(paths: Sequence[str | Path], complaints: list[str]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        try:
            files += find_files([path], SUFFIXES, "sound", "sound file")
        except ValueError as error:
            complaints.append(str(error))
    if not files:
        raise ValueError(complaints[0])
    return files


@torch.inference_mode()
def _pieces(task: Speech, network: nn.Module, features: Tensor) -> list[int]:
    lengths = torch.tensor([features.shape[1]], device=features.device)
    if network.transduces:
        return network.transduce(features, lengths)[0]
    return task.written(*network(features, lengths))[0]


def show(told: Sequence[tuple[str, str]]) -> None:
    """Prints one row a file."""
    table = Table("sound", "what is said")
    for path, text in told:
        table.add_row(path, text)
    show_table(table)


def check_output(path: str | Path) -> Path:
    """The path itself; raises ValueError for an ending that cannot be written, OSError for such a folder."""
    if Path(path).suffix not in (".csv", ".json"):
        raise ValueError(f"The output {path} has an unknown ending: only .csv and .json can be written of transcripts.")
    check_writable(Path(path).parent)
    return Path(path)


def write(told: Sequence[tuple[str, str]], path: str | Path) -> None:
    """Writes a .csv (one row a file) or .json (one list) file, whole or not at all; raises as check_output."""
    path = check_output(path)
    if path.suffix == ".csv":
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([("sound", "text"), *told])
        written = text.getvalue()
    else:
        written = json.dumps([{"sound": name, "text": text} for name, text in told], indent=1, ensure_ascii=False)
    with replacing(path) as temporary:
        temporary.write_text(written, encoding="utf-8")
