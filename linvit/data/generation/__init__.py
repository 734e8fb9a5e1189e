"""Images and latents to generate."""

from linvit.data.generation.digits import DigitImages, GenerationPreprocessing
from linvit.data.generation.latents import Latents

__all__ = ["DigitImages", "GenerationPreprocessing", "Latents"]
