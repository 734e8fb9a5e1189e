"""Images without labels: every image file below a folder."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from linvit.data.disk import files_below, say_unread
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.folder import SPLITS, ImageFiles
from linvit.data.images.image import SUFFIXES
from linvit.data.source import held_out_of
from linvit.files import user_path
from linvit.ranges import Seed, Share


class UnlabelledImages(AugmentedSource):
    """Batches (images, zeros) of all image files below a folder, at any depth.

    Args:
        root: The folder. If it contains train/ and val/, these are the splits.
        held_out: Share of the images to validate on, if root is not divided; 1 holds out all, for evaluation.
        split: Seed that chooses those images by their names, the same on every machine; independent of the run's seed.
        options: See AugmentedSource.

    Raises ValueError for a missing folder, one without images, and a share that leaves nothing to train on or to hold
    out.
    """

    task = "alignment"

    def __init__(self, root: str, held_out: Share = 0.05, split: Seed = 0, **options: Any) -> None:
        super().__init__(**options)
        self.root = user_path(root)
        self.held_out, self.split = held_out, split
        self.class_names: list[str] = []
        if not self.root.is_dir():
            wrong = "is a file" if self.root.exists() else "does not exist"
            raise ValueError(f"The data folder {self.root} {wrong}: set `root` to a folder with images in it.")

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        return ImageFiles([(str(path), 0) for path in self.files(split)], transform, self.channels)

    def files(self, split: str) -> list[Path]:
        """Every image file of "train" or "val", sorted."""
        divided = all((self.root / name).is_dir() for name in SPLITS)
        folder = self.root / split if divided else self.root
        others = Counter[str]()
        files = files_below(folder, SUFFIXES, others)
        if not files:
            raise ValueError(
                f"The data folder {folder} has no image files in it ({', '.join(SUFFIXES[:3])} …), at no depth:"
                " add images, or set `root` to another folder."
            )
        say_unread(folder, others)
        if divided:
            return files
        names = {path.relative_to(self.root).as_posix(): path for path in files}
        held_out = held_out_of(list(names), self.held_out, self.split)
        chosen = [path for name, path in names.items() if (name in held_out) == (split == "val")]
        if not chosen:
            use = "to train on" if split == "train" else "held out"
            raise ValueError(
                f"The data folder {self.root} has {len(files)} images, but none of them is {use}: set `held_out`"
                " between 0 and 1, or add images."
            )
        return chosen
