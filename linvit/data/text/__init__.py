"""Text and other tokens."""

from linvit.data.text.files import Stdlib, TextFolder
from linvit.data.text.hub import HuggingFaceText
from linvit.data.text.recall import Copy, Recall, RecallPreprocessing
from linvit.data.text.source import TextPreprocessing

__all__ = ["Copy", "HuggingFaceText", "Recall", "RecallPreprocessing", "Stdlib", "TextFolder", "TextPreprocessing"]
