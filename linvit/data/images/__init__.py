"""Labelled images: readers, augmentation, preprocessing."""
