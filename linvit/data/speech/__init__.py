"""Speech and its transcripts."""

from linvit.data.speech.hub import HuggingFaceSpeech
from linvit.data.speech.librispeech import LibriSpeech, SpeechFolder, SpeechPreprocessing

__all__ = ["HuggingFaceSpeech", "LibriSpeech", "SpeechFolder", "SpeechPreprocessing"]
