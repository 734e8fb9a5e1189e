"""Runs of language models."""

from typing import TYPE_CHECKING, Any, ClassVar

from linvit.data.source import Source
from linvit.data.text.files import Stdlib, TextFolder, TextPreprocessing
from linvit.data.text.hub import HuggingFaceText
from linvit.runs.decoders import DecoderSpec
from linvit.runs.opening import changed_settings
from linvit.tasks.language import Language

if TYPE_CHECKING:
    from linvit.runs.run import Run


class LanguageSpec(DecoderSpec):
    """Decoders of text."""

    name = "language"
    task = Language
    sources: ClassVar = {"stdlib": Stdlib, "textfolder": TextFolder, "huggingface": HuggingFaceText}
    folder_source = "textfolder"
    preprocessing = TextPreprocessing

    def open_source(self, run: "Run", name: str, settings: dict[str, Any]) -> Source:
        changed = changed_settings(run, name, settings)
        read = {key: getattr(run.preprocessing, key) for key in ("tokenizer", "separator", "context")}
        stored = (run.recipe or {}).get("data") or {}
        if "keeps_apart" in stored:
            read["keeps_apart"] = stored["keeps_apart"]
        if name == "textfolder" and "root" in changed:
            read |= {"suffixes": stored["suffixes"]} if "suffixes" in stored else {}
            settings = settings | {"held_out": changed.get("held_out", 1.0)}
        return self.create_source(name, read | settings)
