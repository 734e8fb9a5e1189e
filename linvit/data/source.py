"""The base class of all data sources, and what is counted in them before anything trains on them."""

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import lightning
import torch
from torch.utils.data import Dataset, default_collate

from linvit.data.disk import SHOWN
from linvit.data.order import Augmented, Batches, ResumableBatches, ShuffledOrder, plain_order
from linvit.environment import replica
from linvit.errors import SettingError, quoted
from linvit.files import reason_of
from linvit.ranges import Amount, Checked, Count, Range, Seed, allows

USUAL_WORKERS = 8
REACHED = tuple[Amount, Amount]  # epoch, batches of it

logger = logging.getLogger(__name__)
Workers = Annotated[int, Range(0, 1024)]


@dataclass(frozen=True)
class Content:
    """What one sample contains.

    size: (height, width) in pixels, (seconds,) of sound or (bytes,) of text. amounts: by what is counted ("images",
    "objects", "pixels"), the amount of each class. others: amounts that belong to no class, by what is counted.
    """

    size: tuple[float, ...]
    amounts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    others: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Contents:
    """The samples of a split, read one by one; a sentence in place of a sample that cannot be used.

    items: has a length and is indexed by whole numbers; its items are described, sentences stay as they are. others:
    amounts that belong to no sample, by what is counted. item: the word for a sample, by default that of the source.
    """

    items: Any
    describe: Callable[[Any], Content | str]
    others: Mapping[str, int] = field(default_factory=dict)
    item: str = ""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Content | str]:
        for index in range(len(self.items)):
            item = self.items[index]
            yield item if isinstance(item, str) else self.describe(item)


def untransformed(*sample: Any) -> Any:
    """The sample as it was read, in place of a transform."""
    return sample if len(sample) > 1 else sample[0]


def image_content(sample: tuple[Any, Any]) -> Content:
    """A PIL image and its class, or 0 or 1 for each class."""
    image, target = sample
    classes: Sequence[int] = [target] if isinstance(target, int) else target.nonzero().flatten().tolist()
    return Content((image.height, image.width), {"images": dict.fromkeys(classes, 1)})


def fitting_workers(num_workers: int) -> int:
    """The number of processes that read data: at most one for each CPU core that this process may use.

    Logs a lower number if more than USUAL_WORKERS were requested, which is above every default.
    """
    cores = usable_cores()
    if num_workers > max(cores, USUAL_WORKERS):
        logger.info("Reading data with %d processes instead of %d: this machine has no more cores.", cores, num_workers)
    return min(num_workers, cores)


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_name(name: str) -> float:
    """A number in 0..1 that depends on the name alone; it is the same on every machine."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def of_split(names: Sequence[str], split: str, held_out: float, seed: int) -> list[str]:
    """The names of one class that belong to "train" or "val", in their order, by hashes of the names and the seed.

    The number of those held out is rounded, but with a share between 0 and 1 both splits get at least one name; a
    single name is for training.
    """
    count = round(held_out * len(names))
    if 0 < held_out < 1:
        count = min(max(1, count), len(names) - 1)
    chosen = set(sorted(names, key=lambda name: (share_of_name(f"{seed} {name}"), name))[:count])
    return [name for name in names if (name in chosen) == (split == "val")]


def check_split(split: str, samples: Sized, described: str, item: str = "images") -> None:
    """Raises SettingError for a split without samples. described: the data with their size, in words."""
    if not len(samples):
        use = "to train on" if split == "train" else "held out"
        raise SettingError(f"{described}, but none of them is {use}: set `held_out` between 0 and 1, or add {item}.")


def listed(names: Sequence[str]) -> str:
    """The first five names."""
    return ", ".join(names[:SHOWN]) + (" …" if len(names) > SHOWN else "")


def untrained(class_names: Sequence[str], present: Collection[int], item: str, ignores: bool = False) -> str:
    """A sentence on the classes that no training item has; "" if there are none. ignores: pixels may be 255."""
    absent = [name for label, name in enumerate(class_names) if label not in present]
    drawn = ignores and len(present) == 1  # a program's 0 and 255
    hint = "; 255 is ignored: if it is a class, set `values` to the label of each class" if drawn else ""
    return f"No training {item} has {len(absent)} of the classes: {listed(absent)}{hint}." if absent else ""


class Source(lightning.LightningDataModule, Checked, ABC):
    """Training and validation batches (images, targets): float32 (batch, channels, height, width) and int64 (batch,).

    A subclass names the task of its targets, sets class_names and preprocessing in its constructor, and returns its
    datasets from train_set and val_set. item: the word for a sample in messages. smaller: the arguments
    that make more batches of the same data if set lower. assemble: makes a batch from a list of samples.
    val_batch_size: samples per validation batch, by default batch_size.
    """

    task = "classification"
    item = "image"
    smaller: tuple[str, ...] = ("batch_size",)
    assemble = staticmethod(default_collate)
    class_names: list[str]
    preprocessing: Any

    def __init__(
        self, batch_size: Count, seed: Seed, num_workers: Workers, max_corrupt: Amount = 0, repeats: Count = 1
    ) -> None:
        super().__init__()
        self.batch_size = self.val_batch_size = batch_size
        self.seed = seed
        self.num_workers = fitting_workers(num_workers)
        self.max_corrupt = max_corrupt
        self.repeats = repeats
        self._batches: ResumableBatches | None = None
        self._reached = (0, 0)

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        """The settings of the data in a recipe for a folder in this source's format, None for any other folder."""
        return None

    def contents(self, split: str) -> Contents:
        """What each sample of "train" or "val" contains; every file is read completely."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def channels(self) -> int:
        return self.preprocessing.channels

    @abstractmethod
    def train_set(self) -> Dataset[Any]:
        """The images and targets of training."""

    @abstractmethod
    def val_set(self) -> Dataset[Any]:
        """The images and targets of validation."""

    def train_order(self, dataset: Dataset[Any]) -> ShuffledOrder:
        return ShuffledOrder(len(dataset), self.seed, self.repeats)  # type: ignore[arg-type]

    def train_dataloader(self) -> Batches:
        dataset = self.train_set()
        order = self.train_order(dataset)
        if len(order) < self.batch_size:
            raise SettingError(
                f"There are {len(order)} training {self.item}s per process, fewer than one batch of {self.batch_size}:"
                f" set {' or '.join(f'`{name}`' for name in self.smaller)} lower."
            )
        self._batches = ResumableBatches(
            Augmented(dataset, self.seed),
            sampler=order,
            drop_last=True,
            reached=self._reached,
            **self._loading(self.num_workers > 0),
        )
        return self._batches

    def val_dataloader(self) -> Batches:
        dataset = self.val_set()
        count, processes = len(dataset), replica()[1]  # type: ignore[arg-type]
        if 0 < count < processes:
            raise ValueError(
                f"There are {count} validation {self.item}s, but {processes} processes: use fewer processes."
            )
        return Batches(dataset, **self._loading(False) | self.val_order(dataset))

    def val_order(self, dataset: Any) -> dict[str, Any]:
        """Which validation samples make a batch, as arguments of a DataLoader."""
        return {"batch_size": self.val_batch_size, "sampler": plain_order(len(dataset))}

    # Lightning can set the loader up before it reads the checkpoint, so the place is kept here and given to both.
    def state_dict(self) -> dict[str, Any]:
        return {"reached": self._batches.reached if self._batches else self._reached}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        reached: Any = state_dict.get("reached")
        if not allows(REACHED, reached):
            raise ValueError(f"The checkpoint's place in the data is {quoted(reached)}: train again from the start.")
        self._reached = tuple(reached)
        if self._batches:
            self._batches.reached = self._reached

    def _loading(self, keeps_workers: bool) -> dict[str, Any]:
        return {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "persistent_workers": keeps_workers,
            "max_corrupt": self.max_corrupt,
            "assemble": self.assemble,
            "pin_memory": torch.cuda.is_available(),
        }


def load_rows(arguments: dict[str, Any], split: str, streaming: bool = False, **columns: str) -> Any:
    """The rows of a split of a data set.

    arguments: of `datasets.load_dataset`. columns: the required columns, by the argument that sets them.
    """
    import datasets

    try:
        rows = datasets.load_dataset(**arguments, split=split, streaming=streaming)
    except Exception as error:  # its class depends on the cause
        damaged = isinstance(error, datasets.exceptions.DatasetGenerationError)  # which says nothing itself
        reason = reason_of(cast(Exception, (damaged and error.__cause__) or error))
        advice = "repair the files, or use others" if damaged else "check `path`, `configuration` and the splits"
        raise ValueError(f"The data set {arguments['path']} cannot be read ({reason}): {advice}.") from error
    for argument, column in columns.items():
        if rows.column_names and column not in rows.column_names:
            known = ", ".join(rows.column_names)
            raise SettingError(f"The data set has no column {column!r}: set `{argument}` to one of {known}.")
    return rows
