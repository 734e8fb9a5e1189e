"""Shared by formats other than COCO's: a held-out share, and the sizes and names of image files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linvit.data.dense.objects import ObjectSource
from linvit.data.images.image import SUFFIXES
from linvit.data.source import held_out_of
from linvit.ranges import Seed, Share


class HeldOutObjects(ObjectSource):
    """Objects of a format that may leave open which images are held out.

    held_out: share of the images that is never trained on, if the data name no splits; 1 holds out all, for
    evaluation. split: seed that chooses those images by their names, the same on every machine; independent of the
    run's seed. options: see ObjectSource.
    """

    def __init__(self, root: str, held_out: Share = 0.2, split: Seed = 0, **options: Any) -> None:
        self.held_out, self.split = held_out, split
        super().__init__(root, **options)

    def divided(self, names: Sequence[str], split: str) -> list[str]:
        """The names of one split, sorted; raises ValueError if it has none."""
        held_out = held_out_of(names, self.held_out, self.split)
        chosen = sorted(held_out if split == "val" else {*names} - held_out)
        if not chosen:
            use = "to train on" if split == "train" else "held out"
            raise ValueError(
                f"The data folder {self.root} has {len(names)} images with annotations, but none of them is {use}: set"
                " `held_out` between 0 and 1, or add images."
            )
        return chosen

    def existing(self, folder: Path) -> Path:
        """The folder itself; raises ValueError if there is none."""
        if not folder.is_dir():
            raise ValueError(f"The data folder {folder} does not exist: set `root` to another folder.")
        return folder


def images_by_name(folder: Path) -> dict[str, Path]:
    """The image files of a folder by their names without ending, sorted; hidden ones and folders are left out."""
    paths = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    return {path.stem: path for path in paths if not path.name.startswith(".")}
