"""Images and latents to generate."""

from linvit.data.generation.cifar import CifarImages
from linvit.data.generation.digits import DigitImages, GenerationPreprocessing
from linvit.data.generation.latents import Latents

__all__ = ["CifarImages", "DigitImages", "GenerationPreprocessing", "Latents"]
