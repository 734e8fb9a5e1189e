"""Decoders and Conformers written to files of other runtimes."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.data.speech.audio import FLOOR, HOP, WINDOW
from linvit.data.text.source import TextPreprocessing
from linvit.data.text.tokens import BYTES, open_tokenizer
from linvit.deploy import Exported, write_sequence
from linvit.deploy.facts import SequenceFacts, digest
from linvit.deploy.formats import format_of
from linvit.deploy.sequences import (
    conformer_example,
    decoder_example,
    in_pieces,
    state_shapes,
    unfused,
)
from linvit.errors import SettingError
from linvit.files import user_path
from linvit.models.conformer import Conformer
from linvit.models.sequence import Decoder
from linvit.runs.trained import Trained

SUFFIXES = (".onnx", ".xml", ".pt2")
SEQUENCE_NETWORKS = (Decoder, Conformer)
COMPARED = ((1, 99), (2, 24))  # sequences and tokens of the comparisons
LONGEST = max(batch * length for batch, length in COMPARED)
TEXT = "A file is read in its runtime as its users read it: many tokens at once, then a few, then one after the other. "
FRAMES = ((1, 5), (1, 301), (2, 75))  # utterances and frames


def export_sequence(
    source: Trained | nn.Module, path: str | Path, dynamic: bool | None, opset: int | None, options: Mapping[str, Any]
) -> Exported:
    """Writes a decoder or Conformer, see `linvit.runs.exporting.export`; options: its arguments that are for images.

    Raises ValueError for options that are set, another suffix, a network that cannot be exported, and a file whose
    outputs differ from the network's.
    """
    unwanted = next((name for name, value in options.items() if value), None)
    if unwanted is not None:
        raise SettingError(f"`{unwanted}` is for networks of images, and this one reads sequences: leave it out.")
    path = user_path(path)
    format = format_of(path, opset=opset)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{format.name} files of decoders and Conformers cannot be written: choose one of {', '.join(SUFFIXES)}."
        )
    network = unfused(deepcopy(source.network if isinstance(source, Trained) else source).eval().cpu().float())
    if isinstance(network, Decoder):
        facts, tokens = _of_decoder(network, source, dynamic is not False)
        shapes = COMPARED if facts.dynamic else COMPARED[:1]
        batches = [tokens[: batch * length].view(batch, length) for batch, length in shapes]
        whole = in_pieces(facts)
        return write_sequence(
            lambda batch: (network(batch),), path, format, facts, decoder_example(network, facts), batches, whole
        )
    assert isinstance(network, Conformer)
    facts = _of_conformer(network, source, dynamic)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(batch, frames, network.mels, generator=generator) for batch, frames in FRAMES]
    example = conformer_example(network)
    return write_sequence(example[0], path, format, facts, example, batches, lambda session: session)


def _of_decoder(network: Decoder, source: Trained | nn.Module, dynamic: bool) -> tuple[SequenceFacts, Tensor]:
    """The facts about a decoder, and LONGEST tokens of an English text to compare on."""
    states = state_shapes(network)
    grow = next((name for name, shape in states.items() if 0 in shape), None)
    if grow is not None and not dynamic:
        raise SettingError(
            f"The cache of {network.mechanism} attention grows with every token, so a file cannot read one token of a"
            " fixed size: leave `dynamic` out, or use a linear mechanism."
        )
    about, tokenizer = {}, open_tokenizer(BYTES)
    if isinstance(source, Trained) and isinstance(source.preprocessing, TextPreprocessing):
        tokenizer = source.preprocessing.open()
        about = {**asdict(source.preprocessing), "separator_token": tokenizer.separator}
    tokens = torch.tensor(tokenizer.encode(TEXT.encode())).repeat(8)[:LONGEST] % network.vocabulary
    facts = _facts(network, source, "language", network.vocabulary, dynamic)
    return SequenceFacts(**facts, states=states, preprocessing=about), tokens


def _of_conformer(network: Conformer, source: Trained | nn.Module, dynamic: bool | None) -> SequenceFacts:
    if network.transduces:
        raise SettingError(
            "A Conformer with a transducer cannot be exported, because its outputs depend on the text so far: train one"
            " with `head=ctc`."
        )
    if dynamic is False:
        raise SettingError("A file of a Conformer reads any number of frames: leave `dynamic=False` out.")
    about: dict[str, Any] = {"mels": network.mels, "window": WINDOW, "hop": HOP, "floor": FLOOR}
    names: tuple[str, ...] = ()
    if isinstance(source, Trained):
        about |= asdict(source.preprocessing)
        names = tuple(source.class_names)
    facts = _facts(network, source, "speech", network.tokens, True)
    return SequenceFacts(**facts, states={}, class_names=names, preprocessing=about)


def _facts(
    network: Decoder | Conformer, source: Trained | nn.Module, task: str, logits: int, dynamic: bool
) -> dict[str, Any]:
    name = source.name if isinstance(source, Trained) else type(network).__name__
    return {
        "name": name,
        "task": task,
        "weights": digest(network),
        "mechanism": network.mechanism,
        "logits": logits,
        "dynamic": dynamic,
    }
