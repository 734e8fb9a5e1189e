"""What a network is asked about: paths, folders, and images in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from linvit.data.images.image import converted, open_image


def find_inputs(inputs: Sequence[Any], suffixes: Sequence[str], kind: str) -> tuple[list[tuple[str, Any]], list[str]]:
    """(name, path or thing in memory) of each input, and a sentence for each path that holds none.

    Folders are searched, sorted, for files with these suffixes; kind says in a word what they are: "image", "sound".

    Raises ValueError where nothing is left.
    """
    items: list[tuple[str, Any]] = []
    missing: list[str] = []
    for number, item in enumerate(inputs, start=1):
        if not isinstance(item, str | Path):
            items.append((f"{kind} {number}", item))
            continue
        path = Path(item)
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.suffix.lower() in suffixes)
        items += [(str(file), file) for file in files]
        if path.is_dir() and not files:
            endings = ", ".join(suffixes[:3]) + " …" * (len(suffixes) > 3)
            missing.append(f"The folder {path} has no {kind} files in it ({endings}).")
        elif not files:
            missing.append(f"There is no {kind} file or folder at {path}: check the path.")
    if not items:
        raise ValueError(missing[0] if missing else f"There is nothing to predict: give {kind} files or folders.")
    return items, missing


def find_images(inputs: Sequence[Any]) -> tuple[list[tuple[str, Any]], list[str]]:
    """find_inputs for images."""
    return find_inputs(inputs, IMG_EXTENSIONS, "image")


def read_image(item: Any, name: str, channels: int = 3) -> Image.Image:
    """A path, PIL image or uint8 array (height, width[, 3]) as a grey or RGB image.

    Raises CorruptImageError for a file that cannot be read, ValueError for an array of another kind.
    """
    if isinstance(item, Path):
        return open_image(item, channels)
    if not isinstance(item, Image.Image):
        array = np.asarray(item)
        if array.dtype != np.uint8 or (array.ndim != 2 and array.shape[2:] != (3,)):
            raise ValueError(
                f"The {name} is an array of {array.dtype} {array.shape}, expected uint8 (height, width) or (height,"
                " width, 3): convert it."
            )
        item = Image.fromarray(array)
    return converted(item, channels)
