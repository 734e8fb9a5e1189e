"""Exported files as runs, which predict and evaluate in the runtimes of the files."""

from pathlib import Path
from typing import Any

from linvit.data.dense.source import DensePreprocessing
from linvit.data.images.image import Preprocessing
from linvit.data.speech.librispeech import SpeechPreprocessing
from linvit.data.text.source import TextPreprocessing
from linvit.deploy.facts import BACKBONE, DETECTIONS, FactsError, SequenceFacts
from linvit.deploy.formats import opened
from linvit.deploy.runtime import Session
from linvit.deploy.sequences import cache_of, zeros
from linvit.files import reason_of
from linvit.ranges import allows, as_tuple
from linvit.runs.exported import (
    ExportedConformer,
    ExportedDecoder,
    ExportedDetector,
    ExportedNetwork,
    ExportedRegionDetector,
)
from linvit.runs.exporting import EXPORTED
from linvit.runs.run import Run
from linvit.runs.tasks import RUNS

KINDS: dict[str, tuple[Any, Any]] = {
    "language": (TextPreprocessing, ExportedDecoder),
    "speech": (SpeechPreprocessing, ExportedConformer),
}


def run_of_file(path: Path) -> Run:
    """A run around an exported file, which predicts and evaluates in its runtime.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if the runtime is not installed.
        ValueError: if the file is damaged, was not written by linvit, or contains a network without a run, which cannot
            predict.
    """
    facts, session = opened(path)
    if isinstance(facts, SequenceFacts):
        return _run_of_sequences(path, facts, session)
    if facts.task == BACKBONE:
        raise ValueError(
            f"{path} is the backbone {facts.name}, which has maps and predicts nothing: give the file of a run, or open"
            " it with `linvit.deploy.formats.opened`."
        )
    if facts.task not in EXPORTED.values() or (facts.fit is None) != (
        RUNS[facts.task].preprocessing_class is Preprocessing
    ):
        raise FactsError(f"What {path} says about its task {facts.task!r} is damaged: export it again.")
    run = RUNS[facts.task]
    lengths = {len(value) for value in facts.stored.values() if isinstance(value, list)}
    if not all(allows(run.stored_facts.get(name), value) for name, value in facts.stored.items()) or lengths - {
        len(facts.class_names)
    }:
        raise FactsError(f"What {path} says about its data is damaged: export it again.")
    kind = ExportedNetwork
    if facts.task == "detection":
        kind = ExportedRegionDetector if facts.outputs == DETECTIONS else ExportedDetector
    network = kind(path, facts, session)
    preprocessing: Any = Preprocessing(facts.size, facts.mean, facts.std, facts.interpolation, facts.crop_pct)
    if facts.fit is not None:
        preprocessing = DensePreprocessing(*facts.fit, facts.mean, facts.std)
    task = run.create_task(network, len(facts.class_names), facts.channels)
    return run(task, list(facts.class_names), preprocessing, path, facts.name, stored=dict(facts.stored))


def _run_of_sequences(path: Path, facts: SequenceFacts, session: Session) -> Run:
    """A run around the file of a decoder or Conformer.

    Raises ValueError for a file of another network than that of a run of language or speech.
    """
    kind, network = KINDS[facts.task]
    if "corpus" not in facts.preprocessing:
        raise ValueError(
            f"{path} does not say how its {facts.inputs[0]} are made, because its network has no run of language or"
            " speech: open it with `linvit.deploy.formats.opened`."
        )
    try:
        known = {name: facts.preprocessing[name] for name in kind.__dataclass_fields__}
        preprocessing = kind(**{name: as_tuple(value) for name, value in known.items()})
        cache_of(zeros(facts.states, 1))
        RUNS[facts.task].check_preprocessing(known)
        if len(facts.class_names) not in (0, facts.logits):
            raise ValueError(f"{len(facts.class_names)} names for {facts.logits} logits")
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FactsError(
            f"What {path} says about its preprocessing and states is damaged ({reason_of(error)}): export it again."
        ) from error
    run = RUNS[facts.task]
    task = run.create_task(network(path, facts, session), facts.logits)
    return run(task, list(facts.class_names), preprocessing, path, facts.name)
