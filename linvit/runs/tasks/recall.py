"""Runs on synthetic sequences: associative recall and copying."""

from typing import TYPE_CHECKING, Any, ClassVar

from linvit.data.source import Source
from linvit.data.text.recall import Copy, Recall, RecallPreprocessing
from linvit.errors import SettingError
from linvit.runs.decoders import DecoderSpec
from linvit.tasks.language import Recall as RecallTask

if TYPE_CHECKING:
    from linvit.runs.run import Run


class RecallSpec(DecoderSpec):
    """Decoders trained on generated sequences, measured on some of the tokens only."""

    name = "recall"
    task = RecallTask
    sources: ClassVar = {"recall": Recall, "copy": Copy}
    folder_source = "recall"
    preprocessing = RecallPreprocessing
    instead_of_predict = instead_of_generate = "use `evaluate` instead"

    def open_source(self, run: "Run", name: str, stored: dict[str, Any], given: dict[str, Any]) -> Source:
        if "root" in given:
            raise SettingError("`root` is a folder, but the sequences of this run are synthetic: leave it out.")
        return super().open_source(run, name, stored, given)


SPEC = RecallSpec()
