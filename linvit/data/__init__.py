"""Batches of labelled images, text and speech: each source is a LightningDataModule, listed by its name in recipes."""

from typing import Any

from linvit.data.dense import Ade20k, Coco, DensePreprocessing
from linvit.data.generation import DigitImages, GenerationPreprocessing, Latents
from linvit.data.images import Digits, ImageFolder, Preprocessing, TimmImages
from linvit.data.source import Source
from linvit.data.speech import HuggingFaceSpeech, LibriSpeech, SpeechFolder, SpeechPreprocessing
from linvit.data.text import (
    Copy,
    HuggingFaceText,
    Recall,
    RecallPreprocessing,
    Stdlib,
    TextFolder,
    TextPreprocessing,
)

__all__ = [
    "DensePreprocessing",
    "GenerationPreprocessing",
    "Preprocessing",
    "RecallPreprocessing",
    "SpeechFolder",
    "SpeechPreprocessing",
    "TextPreprocessing",
]

SOURCES: dict[str, type[Source]] = {
    "digits": Digits,
    "digit_images": DigitImages,
    "latents": Latents,
    "imagefolder": ImageFolder,
    "timm": TimmImages,
    "coco": Coco,
    "ade20k": Ade20k,
    "stdlib": Stdlib,
    "textfolder": TextFolder,
    "huggingface": HuggingFaceText,
    "recall": Recall,
    "copy": Copy,
    "librispeech": LibriSpeech,
    "huggingface_speech": HuggingFaceSpeech,
}


def create_source(name: str, **settings: Any) -> Source:
    """A source by its name in SOURCES, with the settings of a recipe: its lists of numbers are tuples here."""
    return SOURCES[name](**{key: as_tuple(value) for key, value in settings.items()})


def as_tuple(value: Any) -> Any:
    """A list of numbers as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) and not any(isinstance(item, str) for item in value) else value
