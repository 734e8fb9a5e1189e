"""Images and latents to generate."""

from linvit.data.generation.latents import Latents
from linvit.data.generation.pixels import CifarImages, DigitImages, GenerationPreprocessing

__all__ = ["CifarImages", "DigitImages", "GenerationPreprocessing", "Latents"]
