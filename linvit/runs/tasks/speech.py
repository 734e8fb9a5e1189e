"""Runs of speech recognition."""

from typing import TYPE_CHECKING, Any, ClassVar

from linvit.data.source import Source
from linvit.data.speech.hub import HuggingFaceSpeech
from linvit.data.speech.librispeech import LibriSpeech, SpeechFolder, SpeechPreprocessing
from linvit.models.conformer import create_conformer
from linvit.runs.named import NamedSpec
from linvit.runs.opening import changed_settings
from linvit.tasks.speech import Speech

if TYPE_CHECKING:
    from linvit.runs.run import Run


class SpeechSpec(NamedSpec):
    """Conformers with CTC or a transducer."""

    name = "speech"
    task = Speech
    sources: ClassVar = {"librispeech": LibriSpeech, "huggingface_speech": HuggingFaceSpeech}
    folder_source = "librispeech"
    preprocessing = SpeechPreprocessing
    kept = ("beam",)
    create = staticmethod(create_conformer)

    def open_source(self, run: "Run", name: str, settings: dict[str, Any]) -> Source:
        changed = changed_settings(run, name, settings)
        if name == "librispeech" and "root" in changed and "val" not in changed:
            source: LibriSpeech = SpeechFolder(settings["root"], run.class_names, run.preprocessing)
            source.batch_size = settings.get("batch_size", source.batch_size)
            source.num_workers = settings.get("num_workers", source.num_workers)
            return source
        source = self.create_source(name, settings)  # type: ignore[assignment]
        source.class_names, source.preprocessing = run.class_names, run.preprocessing
        return source
