"""Speech and its transcripts."""

from linvit.data.speech.an4 import AN4
from linvit.data.speech.hub import HuggingFaceSpeech
from linvit.data.speech.librispeech import LibriSpeech, SpeechFolder, SpeechPreprocessing

__all__ = ["AN4", "HuggingFaceSpeech", "LibriSpeech", "SpeechFolder", "SpeechPreprocessing"]
