"""Data sets for a machine without network: images of clones, packed into pieces that travel one by one.

A piece is a tar file in build/data, NAME.1-of-2.tar.gz; unpacked they are a folder train/CLASS, val/CLASS.
"""

import io
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from evidence.gpu import cifar
from evidence.rows import ROOT, Call

DATA, PIECES = ROOT / "data", ROOT / "build" / "data"
LARGEST = cifar.LARGEST
ENTRY = 128  # bytes of a compressed tar file for each file in it, at most, beside its content
QUALITY = 85


@dataclass(frozen=True)
class Pack:
    """A data set. clone: the folder in data. choose: clone → path here, path in the clone. side: None keeps images."""

    name: str
    clone: str
    choose: Callable[[Path], Mapping[str, Path]]
    side: int | None = None

    def run(self, call: Call) -> None:
        """As a row of the table of evidence."""
        print(self.carry(DATA / self.clone))

    def left(self, call: Call) -> str:
        ready = (DATA / self.name).is_dir() or self.pieces(PIECES)
        return f"{'packed' if ready else 'not packed'}, from a clone in data/{self.clone}"

    def carry(self, images: Path, pieces: Path = PIECES) -> str:
        """Writes the pieces, and says how large they are. Raises ValueError if one is larger than LARGEST."""
        pieces.mkdir(parents=True, exist_ok=True)
        for old in self.pieces(pieces):
            old.unlink()
        files = {place: encoded(path, self.side) for place, path in sorted(self.choose(images).items())}
        groups, size = [list[str]()], 0
        for place, content in files.items():
            size += len(content) + ENTRY
            if size > LARGEST:
                groups.append([])
                size = len(content) + ENTRY
            groups[-1].append(place)
        sizes = []
        for number, places in enumerate(groups, 1):
            piece = pieces / f"{self.name}.{number}-of-{len(groups)}.tar.gz"
            write_tar(piece, {place: files[place] for place in places})
            if (size := piece.stat().st_size) > LARGEST:
                raise ValueError(f"{piece} has {size:,} bytes, expected at most {LARGEST:,}: set ENTRY higher.")
            sizes.append(f"{size / 2**20:.1f}")
        return f"{pieces}/{self.name}: {len(files):,} images in {len(sizes)} pieces of {', '.join(sizes)} MiB."

    def pieces(self, folder: Path) -> list[Path]:
        return sorted(folder.glob(f"{self.name}.*-of-*.tar.gz"))

    def unpacked(self, folder: Path, pieces: Path = PIECES) -> Path:
        """The folder with the images, made from the pieces if it is not there.

        Raises FileNotFoundError if a piece is missing.
        """
        if folder.is_dir():
            return folder
        ready = self.pieces(pieces)
        expected = int(ready[0].name.removesuffix(".tar.gz").rpartition("-")[2]) if ready else 1
        if len(ready) != expected:
            raise FileNotFoundError(
                f"There is no {folder}, and {pieces} has {len(ready)} of {expected} pieces of {self.name}: run"
                f" `python -m evidence run {self.name}`, and copy every piece."
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder.parent) as made:
            for piece in ready:
                with tarfile.open(piece) as packed:
                    packed.extractall(Path(made) / self.name, filter="data")
            (Path(made) / self.name).rename(folder)
        return folder


def encoded(path: Path, side: int | None) -> bytes:
    """The file, or a JPEG of it whose shorter side has that many pixels."""
    if side is None:
        return path.read_bytes()
    with Image.open(path) as image:
        scale, out = side / min(image.size), io.BytesIO()
        size = round(image.width * scale), round(image.height * scale)
        image.convert("RGB").resize(size, Image.Resampling.BICUBIC).save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


def write_tar(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w:gz", compresslevel=6) as packed:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def by_split(images: Path) -> dict[str, Path]:
    """The images of a clone with train/CLASS and val/CLASS."""
    return _placed(images, (path for split in ("train", "val") for path in (images / split).glob("*/*")))


def hundred_classes(images: Path) -> dict[str, Path]:
    """Every second of Tiny ImageNet's classes, in the order of their names; its validation images by class."""
    root = next(images.glob("**/wnids.txt")).parent
    classes = sorted(path.name for path in (root / "train").iterdir())[::2]
    train = (path for name in classes for path in (root / "train" / name / "images").iterdir())
    chosen = {f"train/{path.parent.parent.name}/{path.name}": path for path in train}
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        file, name, *_ = line.split("\t")
        if name in classes:
            chosen[f"val/{name}/{file}"] = root / "val" / "images" / file
    return chosen


def _placed(root: Path, paths: Iterable[Path]) -> dict[str, Path]:
    return {path.relative_to(root).as_posix(): path for path in paths}


PACKS = {
    pack.name: pack
    for pack in (
        Pack("imagenette-128", "imagenette-images", by_split, 128),
        Pack("imagenette-224", "imagenette-images", by_split),
        Pack("tiny-imagenet-100", "tiny-imagenet-images", hundred_classes),
    )
}


def unpacked(name: str) -> Path:
    """The folder of a data set, unpacked if need be. Raises FileNotFoundError without its pieces."""
    return cifar.unpacked() if name == "cifar" else PACKS[name].unpacked(DATA / name)
