"""Images from timm's readers: folders, tar files, WebDataset shards, Hugging Face data sets."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timm.data import create_dataset
from timm.data.readers.reader_image_folder import ReaderImageFolder
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from linvit.data.disk import check_regular, is_hidden
from linvit.data.images.augmented import AugmentedSource
from linvit.data.images.image import MODES, CorruptImageError, open_image
from linvit.data.order import Batches, Streamed
from linvit.environment import replica
from linvit.errors import SettingError, refuse
from linvit.files import explained
from linvit.ranges import Count

STREAMS = ("wds", "tfds", "hfids")
INDEXED = ("", "hfds")

logger = logging.getLogger(__name__)


class TimmImages(AugmentedSource):
    """Images that timm.data.create_dataset reads, augmented like those of an image folder.

    reader: timm's name of a data set: "" for a folder with train/ and val/ or for a tar file, "hfds/…" for a Hugging
    Face data set, "wds/…", "tfds/…", "hfids/…" for streams. root: folder, tar file or cache folder. val_root: the same
    for the validation images, if they are elsewhere. train_split, val_split: timm's names of the splits. class_map:
    file of class names in the order of their indices. num_labels: number of classes, for a reader without class names.
    class_names: fixes the order of the classes. options: see AugmentedSource.

    Runs with indexed readers resume bit for bit. A stream resumes with newly shuffled images, cannot be used for
    repeated augmentation, leaves corrupt images out without counting them, and is validated by one process only.
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
        others = ", ".join(f"{kind}/…" for kind in (*INDEXED[1:], *STREAMS))
        refuse(
            kind not in (*INDEXED, *STREAMS)
            and f"`reader` is {reader!r}, expected '' for a folder or tar file, or {others}: choose one of them.",
            kind in STREAMS
            and self.repeats > 1
            and (
                f"`repeats` is {self.repeats}, but the reader {reader} is a stream, whose images come once per epoch:"
                " set it to 1."
            ),
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
        return Streamed(
            self.train_set(),
            drop_last=True,
            epoch=lambda: self.trainer.current_epoch if self.trainer else 0,
            **self._loading(self.num_workers > 0),
        )

    def val_dataloader(self) -> Batches:
        if not self.streams or self.preprocessing.resize == "none":
            return super().val_dataloader()
        if replica()[1] > 1:
            raise ValueError(
                f"The reader {self.reader} is a stream, which several processes cannot share so that every image counts"
                " once: validate in one process, and train without validation in several."
            )
        return Batches(self.val_set(), **self._loading(False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.streams:
            logger.warning("The reader %s is a stream: the run resumes, but not bit for bit.", self.reader)

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
            try:  # evaluation needs the validation images only
                names = names_of(self._open("val").reader)
            except ValueError:
                raise error from None
        if names is not None:
            return names
        if count is None:
            raise SettingError(f"The reader {self.reader} knows no class names: set `num_labels` to their number.")
        return [str(index) for index in range(count)]

    def _open(self, split: str) -> Any:
        root, name = Path(self.roots[split]), self.splits[split]
        if not self.reader:  # timm would follow links in a circle without end
            _check_links(root)
            synonyms = {"train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "evaluation")}
            divides = not (split == "val" and self.separate)
            refuse(
                divides
                and root.is_file()
                and split == "val"
                and f"{root} has the training images: set `val_root` to the file of validation images.",
                divides
                and root.is_dir()
                and not any((root / each).is_dir() for each in (name, *synonyms[split]))
                and f"The data folder {root} has no {split}/ in it: expected {split}/CLASS/image files.",
            )
        arguments: dict[str, Any] = {"batch_size": self.batch_size, "seed": self.seed} if self.streams else {}
        if self.class_map is not None:
            arguments["class_map"] = self.class_map
        with explained(
            lambda reason: (
                f"timm's reader {self.reader or 'of files'} cannot open the split {name!r} of {root} ({reason}):"
                " correct `reader`, `root`, `train_split` or `val_split`."
            ),
            raised=SettingError,
        ):
            dataset: Any = create_dataset(
                self.reader,
                root=str(root),
                split=name,
                search_split=not (split == "val" and self.separate),
                is_training=split == "train",
                input_img_mode=MODES[self.channels],
                **arguments,
            )
            if isinstance(dataset.reader, ReaderImageFolder):
                _leave_out_hidden(dataset.reader)
        return dataset


def _check_links(root: Path) -> None:
    """Raises ValueError if there is nothing at root, and for a link to a folder that contains it."""
    if not root.exists():
        raise SettingError(f"{root} does not exist: set `root` to a folder or tar file.")
    for folder, _, _ in os.walk(root, followlinks=True):
        above = {os.path.realpath(parent) for parent in Path(folder).parents if parent.is_relative_to(root)}
        if os.path.realpath(folder) in above:
            raise ValueError(f"{folder} is a link to a folder that contains it: remove the link.")


def names_of(reader: Any) -> list[str] | None:
    """The names of a reader's classes in the order of their indices; None for a reader without class names."""
    known: Mapping[Any, int] = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", None) or {}
    return [str(name) for name in sorted(known, key=known.__getitem__)] or None


def _leave_out_hidden(reader: ReaderImageFolder) -> None:
    """Leaves out hidden files, and numbers the classes without hidden folders."""
    root, number_of = Path(reader.root), reader.class_to_idx
    names = [name for name in sorted(number_of, key=number_of.__getitem__) if not name.startswith(".")]
    renumbered = {number_of[name]: number for number, name in enumerate(names)}
    visible = [(path, target) for path, target in reader.samples if not is_hidden(Path(path), root)]
    reader.samples = [(path, renumbered[target]) for path, target in visible]
    reader.class_to_idx = {name: number for number, name in enumerate(names)}


@dataclass(eq=False)
class ReadImages(Dataset[Any]):
    """(image, target) of an indexed reader; a sentence that names the file if it is unreadable."""

    reader: Any
    transform: Callable[[Any], Tensor]
    index_of: list[int] | None
    channels: int

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        name = str(self.reader.filename(index, absolute=True))
        try:
            if isinstance(self.reader, ReaderImageFolder):
                check_regular(name)
            file, target = self.reader[index][:2]
            with file:
                image = open_image(file, self.channels, name)
        except CorruptImageError as error:
            return str(error)
        except OSError as error:
            return f"{name} cannot be opened ({error.strerror or error}): replace or remove the file."
        return self.transform(image), target if self.index_of is None else self.index_of[target]

    def __len__(self) -> int:
        return len(self.reader)


class Stream(IterableDataset[Any]):
    """(image, target) of a stream, each once; without a length, which readers only estimate for validation."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Tensor], index_of: list[int] | None) -> None:
        self.dataset = dataset
        self.dataset.transform = transform
        self.dataset.target_transform = index_of.__getitem__ if index_of else None
        self.set_epoch = dataset.set_epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        try:
            yield from self.dataset
        except KeyError as error:  # of timm's table of classes
            raise SettingError(
                f"The stream has images of the class {error}, which is missing from `class_map`: add it."
            ) from error


class SizedStream(Stream):
    """A stream of training images; its reader ends an epoch after exactly len() images."""

    def __len__(self) -> int:
        return len(self.dataset)
