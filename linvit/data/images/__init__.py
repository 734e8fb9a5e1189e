"""Labelled images: readers, augmentation, preprocessing."""

from linvit.data.images.folder import ImageFolder
from linvit.data.images.image import Preprocessing
from linvit.data.images.readers import TimmImages
from linvit.data.images.small import Digits

__all__ = ["Digits", "ImageFolder", "Preprocessing", "TimmImages"]
