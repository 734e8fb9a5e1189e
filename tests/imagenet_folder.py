"""A folder in ImageNet's layout, small enough for a test, and the same images as tar files and WebDataset shards."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = [(48, 64), (70, 40), (37, 37), (33, 90)]
CLASSES = ("n01440764", "n01443537", "n02099601")


def fill(folder: Path, count: int, hue: int = 0) -> None:
    """Noisy pictures of several sizes, PNG and JPEG in turn, brighter in the channel `hue`."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(hue)
    for number in range(count):
        pixels = generator.integers(0, 128, (*SIZES[number % len(SIZES)], 3), dtype=np.uint8)
        pixels[..., hue % 3] += 100
        Image.fromarray(pixels).save(folder / f"{number}.{'png' if number % 2 else 'jpeg'}")


def write_imagenet(root: Path, train: int = 4, val: tuple[int, ...] = (3, 2, 2), names=CLASSES) -> Path:
    """root/train and root/val with `train` and `val` pictures a class; 12 and 7 in all by default."""
    for hue, (name, count) in enumerate(zip(names, val, strict=True)):
        fill(root / "train" / name, train, hue)
        fill(root / "val" / name, count, hue)
    return root


def write_tars(root: Path, folder: Path) -> Path:
    """folder/train.tar and folder/val.tar, which have a folder for each class."""
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.tar", "w") as file:
            for picture in sorted((root / split).rglob("*.*")):
                file.add(picture, picture.relative_to(root / split))
    return folder


def write_shards(root: Path, folder: Path, names=CLASSES, size: int = 4) -> Path:
    """WebDataset shards of `size` samples, with all classes in turn: NUMBER.png or .jpg beside NUMBER.cls."""
    splits = {}
    for split in ("train", "val"):
        pictures = sorted((root / split).rglob("*.*"), key=lambda path: (path.stem, path.parent.name))
        parts = [pictures[start : start + size] for start in range(0, len(pictures), size)]
        files = [f"{split}-{number}.tar" for number in range(len(parts))]
        for name, part in zip(files, parts, strict=True):
            with tarfile.open(folder / name, "w") as file:
                for number, path in enumerate(part):
                    ending, label = "png" if path.suffix == ".png" else "jpg", str(names.index(path.parent.name))
                    for key, content in ((ending, path.read_bytes()), ("cls", label.encode())):
                        entry = tarfile.TarInfo(f"{name}{number:03}".replace(".", "_") + f".{key}")
                        entry.size = len(content)
                        file.addfile(entry, io.BytesIO(content))
        lengths = [len(part) for part in parts]
        splits[split] = {"name": split, "num_samples": len(pictures), "filenames": files, "shard_lengths": lengths}
    (folder / "_info.json").write_text(json.dumps({"splits": splits}))
    return folder
