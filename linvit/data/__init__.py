"""Batches of labelled images, text and speech: each source is a LightningDataModule, listed by its name in recipes."""

from typing import Any

from linvit.data.dense.ade20k import Ade20k as Ade20k
from linvit.data.dense.coco import Coco as Coco
from linvit.data.dense.source import DensePreprocessing as DensePreprocessing
from linvit.data.generation.digits import DigitImages as DigitImages
from linvit.data.generation.digits import GenerationPreprocessing as GenerationPreprocessing
from linvit.data.generation.latents import Latents as Latents
from linvit.data.images.digits import Digits as Digits
from linvit.data.images.folder import ImageFolder as ImageFolder
from linvit.data.images.image import Preprocessing as Preprocessing
from linvit.data.images.image import open_image as open_image
from linvit.data.images.readers import TimmImages as TimmImages
from linvit.data.source import Source as Source
from linvit.data.speech.hub import HuggingFaceSpeech as HuggingFaceSpeech
from linvit.data.speech.librispeech import LibriSpeech as LibriSpeech
from linvit.data.speech.librispeech import SpeechFolder as SpeechFolder
from linvit.data.speech.librispeech import SpeechPreprocessing as SpeechPreprocessing
from linvit.data.text.files import Stdlib as Stdlib
from linvit.data.text.files import TextFolder as TextFolder
from linvit.data.text.files import TextPreprocessing as TextPreprocessing
from linvit.data.text.hub import HuggingFaceText as HuggingFaceText
from linvit.data.text.recall import Copy as Copy
from linvit.data.text.recall import Recall as Recall
from linvit.data.text.recall import RecallPreprocessing as RecallPreprocessing

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
