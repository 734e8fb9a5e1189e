"""timm's readers: folders and tar files, WebDataset shards, Hugging Face data sets."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import create_dataset
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.image import MODES, CorruptImageError, open_image
from linvit.data.order import Batches, Streamed, share
from linvit.files import reason_of
from linvit.ranges import Count

STREAMS = ("wds", "tfds", "hfids")
INDEXED = ("", "hfds")

logger = logging.getLogger(__name__)


class TimmImages(AugmentedSource):
    """What timm.data.create_dataset reads, augmented as an image folder is.

    reader: timm's name of a data set: "" for a folder with train/ and val/ or for a tar file, "hfds/…" for a Hugging
    Face data set, "wds/…", "tfds/…", "hfids/…" for streams. root: folder, tar file or cache folder; val_root: of the
    validation images where that is another. train_split, val_split: timm's names of the splits. class_map: file of
    class names in the order of their indices. num_labels: number of classes, for a reader that knows no names.
    class_names: fixes the order of the classes. options: see AugmentedSource.

    Indexed readers resume bit for bit. A stream resumes with newly shuffled images, is not repeated for
    repeated augmentation, leaves corrupt images out uncounted, and is validated by one process only.

    Raises ValueError for what the reader refuses, and for a class of the data that is none of the classes.
    """

    def __init__(
        self,
        root: str,
        reader: str = "",
        val_root: str | None = None,
        train_split: str = "train",
        val_split: str = "validation",
        class_map: str | None = None,
        num_labels: Count | None = None,
        class_names: list[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        kind = reader.partition("/")[0].lower()
        if kind not in (*INDEXED, *STREAMS):
            known = ", ".join(f"{kind}/…" for kind in (*INDEXED[1:], *STREAMS))
            raise ValueError(
                f"`reader` is {reader!r}, expected '' for a folder or tar file, or {known}: choose one of them."
            )
        if kind in STREAMS and self.repeats > 1:
            raise ValueError(
                f"`repeats` is {self.repeats}, but the reader {reader} is a stream, whose images come once per epoch:"
                " set it to 1."
            )
        self.streams = kind in STREAMS
        self.reader = reader
        self.roots = {"train": root, "val": val_root or root}
        self.splits = {"train": train_split, "val": val_split}
        self.separate = val_root is not None
        self.class_map = class_map
        self.class_names = class_names or self._read_class_names(num_labels)

    def train_dataloader(self) -> Batches:
        if not self.streams:
            return super().train_dataloader()
        return Streamed(self.train_set(), drop_last=True, epoch=self._epoch, **self._loading(self.num_workers > 0))

    def val_dataloader(self) -> Batches:
        if not self.streams:
            return super().val_dataloader()
        if share()[1] > 1:
            raise ValueError(
                f"The reader {self.reader} is a stream, which several processes cannot share so that every image counts"
                " once: validate in one process, and train without validation in several."
            )
        return Batches(self.val_set(), **self._loading(False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.streams:
            logger.warning("The reader %s is a stream: the run resumes, but not bit for bit.", self.reader)

    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer else 0

    def images(self, split: str, transform: Callable[[Any], Tensor]) -> Dataset[Any]:
        dataset = self._open(split)
        names = names_of(dataset.reader)
        index_of = None if names is None else self.places(names, self.roots[split])
        if self.streams:
            dataset.set_loader_cfg(num_workers=self.num_workers)
            return (SizedStream if split == "train" else Stream)(dataset, transform, index_of)
        return ReadImages(dataset.reader, transform, index_of, self.channels)

    def _read_class_names(self, count: int | None) -> list[str]:
        try:
            names = names_of(self._open("train").reader)
        except ValueError as error:
            try:  # for evaluation the validation images alone will do
                names = names_of(self._open("val").reader)
            except ValueError:
                raise error from None
        if names is None and count is None:
            raise ValueError(f"The reader {self.reader} knows no classes: set `num_labels` to their number.")
        return names if names is not None else [str(index) for index in range(count)]  # type: ignore[arg-type]

    def _open(self, split: str) -> Any:
        root, name = Path(self.roots[split]), self.splits[split]
        if not self.reader:
            self._check_files(root, split)
        arguments = {"batch_size": self.batch_size, "seed": self.seed} if self.streams else {}
        try:
            return create_dataset(
                self.reader,
                root=str(root),
                split=name,
                search_split=not (split == "val" and self.separate),
                class_map=self.class_map,
                is_training=split == "train",
                input_img_mode=MODES[self.channels],
                **arguments,
            )
        except Exception as error:  # the kind depends on the reader
            raise ValueError(
                f"timm's reader {self.reader or 'of files'} cannot open the split {name!r} of {root}"
                f" ({reason_of(error)}): set `reader`, `root`, `train_split` and `val_split` to what is there."
            ) from error

    def _check_files(self, root: Path, split: str) -> None:
        if not root.exists():
            raise ValueError(f"{root} does not exist: set `root` to a folder or tar file.")
        if split == "val" and self.separate:
            return
        if root.is_file() and split == "val":
            raise ValueError(f"{root} has the training images: set `val_root` to the file of validation images.")
        synonyms = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}
        if root.is_dir() and not any((root / name).is_dir() for name in (self.splits[split], *synonyms[split])):
            raise ValueError(f"The data folder {root} has no {split}/ in it: expected {split}/CLASS/image files.")


def names_of(reader: Any) -> list[str] | None:
    """The names of a reader's classes in the order of their indices, null where it knows none."""
    known: Mapping[Any, int] = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}
    return [str(name) for name in sorted(known, key=known.__getitem__)] or None


@dataclass(eq=False)
class ReadImages(Dataset[Any]):
    """(image, target) of an indexed reader; a sentence that names the file where it is unreadable."""

    reader: Any
    transform: Callable[[Any], Tensor]
    index_of: list[int] | None
    channels: int

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        file, target = self.reader[index][:2]
        try:
            with file:
                image = open_image(file, self.channels, name=self.reader.filename(index, absolute=True))
        except CorruptImageError as error:
            return str(error)
        return self.transform(image), target if self.index_of is None else self.index_of[target]

    def __len__(self) -> int:
        return len(self.reader)


class Stream(IterableDataset[Any]):
    """(image, target) of a stream, once each; without a length, because readers only estimate that of a validation."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Tensor], index_of: list[int] | None) -> None:
        self.dataset = dataset
        self.dataset.transform = transform
        self.dataset.target_transform = index_of.__getitem__ if index_of else None
        self.set_epoch = dataset.set_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return iter(self.dataset)


class SizedStream(Stream):
    """A stream of training images, whose reader ends an epoch at exactly its length."""

    def __len__(self) -> int:
        return len(self.dataset)
