"""`linvit eval --report` of a run that hears speech: errors by speaker, and the utterances with the most."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.analysis.report import paragraph, table, write_page
from linvit.data import LibriSpeech
from linvit.runs.evaluate import cell, table_rows
from linvit.runs.report import curve
from linvit.runs.restore import Restored, source_for
from linvit.tasks.transcription import spelled, word_edits

SHOWN = 20


def write_report(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    path: Path,
    data: str | None = None,
    num_workers: int | None = None,
) -> None:
    """Writes the page of a network that hears on source_for(restored, data); measured is what `evaluate` returned."""
    source = source_for(restored, data, num_workers)
    told = f"{restored.told()} Data: {source.preprocessing.corpus}. Measured on {source.root}."
    heard = _heard(restored, restored.judged, source)
    worst = sorted(heard, key=lambda one: -one["edits"])
    wrong = [one for one in worst if one["edits"]][:SHOWN]
    right = [one for one in heard if not one["edits"]][:5]
    sections: list[tuple[str, Any]] = [
        ("What was measured", [table(table_rows(measured)), paragraph(told)]),
        *curve(restored),
        ("By speaker", [table(_by_speaker(heard))]),
        (f"The {len(wrong)} utterances with the most errors", [table(wrong)] if wrong else [paragraph("None.")]),
        ("Without an error", [table(right)] if right else [paragraph("None.")]),
    ]
    write_page(path, f"linvit: {restored.name}", sections)


@torch.inference_mode()
def _heard(restored: Restored, network: nn.Module, source: LibriSpeech) -> list[dict[str, Any]]:
    """Of each utterance: speaker, what was said, what was written, and the edits between the two in words."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = network.to(device).eval()
    told = []
    for features, targets in source.val_dataloader():
        heard = features.to(device), targets["lengths"].to(device)
        found = network.transduce(*heard) if network.transduces else restored.task.written(*network(*heard))
        for pieces, text, path in zip(found, targets["texts"], targets["paths"], strict=True):
            written = spelled(pieces, restored.class_names)
            edits, words = word_edits(text, written)
            row = {"speaker": _speaker(path), "file": path.name, "said": text, "written": written}
            told.append(row | {"edits": edits, "words": words})
    return told


def _speaker(path: Path) -> str:
    """The folder above the chapter's; where the path has none, the nearest: the split of a data set of the hub."""
    folders = path.parts[:-1]
    return folders[-2:][0] if folders else "–"


def _by_speaker(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in heard:
        found[one["speaker"]].append(one)
    rows = []
    for speaker, own in sorted(found.items()):
        edits, words = (sum(one[key] for one in own) for key in ("edits", "words"))
        rate = edits / max(words, 1)
        rows.append(
            {
                "speaker": speaker,
                "utterances": len(own),
                "words": words,
                "edits": edits,
                "word error rate": cell("wer", rate),
            }
        )
    return rows
