"""A folder of class folders, small enough for a test."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image


def write_classes(root: Path, counts: Mapping[str, int], size: tuple[int, int] = (40, 50)) -> Path:
    """So many noisy PNGs of (height, width) in each class folder; the first class is red, the second green …"""
    generator = np.random.default_rng(0)
    for place, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 128, (*size, 3), dtype=np.uint8)
            pixels[..., place % 3] += 100
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root
