"""The order of samples. Random choices depend on (seed, epoch, index) alone, so a stopped run resumes exactly.

The number of worker processes makes no difference.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from linvit.data.disk import SHOWN, none_usable, refusal
from linvit.environment import replica

Position = tuple[int, ...]
ROUND = 256

logger = logging.getLogger(__name__)


def entropy(*numbers: int) -> int:
    """A 32-bit seed that mixes several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


class ShuffledOrder(Sampler[Position]):
    """Positions (epoch, index), shuffled by (seed, epoch); each process reads every world-size-th position.

    With repeats above 1 (repeated augmentation, as timm's RepeatAugSampler), positions are (epoch, index, copy), the
    copies of an image follow each other, and an epoch has `length` positions, rounded down to a multiple of 256.
    """

    def __init__(self, length: int, seed: int, repeats: int = 1) -> None:
        self.length = length
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Position]:
        rank, world = replica()
        generator = torch.Generator().manual_seed(entropy(self.seed, self.epoch))
        order = self.shuffled(generator)
        mine = range(rank, self.length * self.repeats, world)[self.skipped : len(self)]
        for place in mine:
            index, copy = order[place // self.repeats], place % self.repeats
            yield (self.epoch, index) if self.repeats == 1 else (self.epoch, index, copy)

    def shuffled(self, generator: torch.Generator) -> list[int]:
        """All indices in the epoch's order, the same in every process."""
        return torch.randperm(self.length, generator=generator).tolist()

    def __len__(self) -> int:
        rounded = self.repeats > 1 and self.length >= ROUND
        return (self.length // ROUND * ROUND if rounded else self.length) // replica()[1]


class GroupedOrder(ShuffledOrder):
    """A ShuffledOrder whose batches contain samples of one group, such as wide or tall images; the rest is last, mixed.

    groups: the group of each sample. batch_size: samples per batch of one process; the processes' batches of a step are
    of one group too.
    """

    def __init__(self, groups: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(groups), seed)
        self.groups = groups
        self.batch_size = batch_size

    def shuffled(self, generator: torch.Generator) -> list[int]:
        order = super().shuffled(generator)
        together = self.batch_size * replica()[1]
        batches, rest = [], []
        for group in sorted(set(self.groups)):
            members = [index for index in order if self.groups[index] == group]
            full = len(members) // together * together
            batches += [members[start : start + together] for start in range(0, full, together)]
            rest += members[full:]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        mixed = [rest[place] for place in torch.randperm(len(rest), generator=generator).tolist()]
        return [index for number in shuffled for index in batches[number]] + mixed


def plain_order(length: int) -> range:
    """Indices in order; with several processes each index goes to exactly one of them, without padding."""
    rank, world = replica()
    return range(rank, length, world)


def batches_of_one_size(sizes: Sequence[tuple[int, int]], batch_size: int, pixels: int) -> list[list[int]]:
    """Batches of the indices of images of one size, small sizes first; each process gets every world-size-th batch.

    sizes: height and width of each image. batch_size: images in a batch, fewer where they have more than `pixels`, and
    where a process would get no batch.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for index, size in enumerate(sizes):
        alike.setdefault(size, []).append(index)
    batches: list[list[int]] = []
    for (height, width), indices in sorted(alike.items()):
        count = max(1, min(batch_size, pixels // max(1, height * width)))
        batches += [indices[start : start + count] for start in range(0, len(indices), count)]
    rank, world = replica()
    if len(batches) < world and batch_size > 1:
        return batches_of_one_size(sizes, batch_size // 2, pixels)
    return batches[rank::world]


class Augmented(Dataset[Any]):
    """Seeds all generators from (seed, epoch, index, copy) before the wrapped dataset reads and augments it."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, position: Position) -> Any:
        seed = entropy(self.seed, *position)
        random.seed(seed)
        np.random.seed(seed)
        # not torch.manual_seed: in a worker without a GPU context that queues one call per image, without end
        torch.default_generator.manual_seed(seed)
        return self.dataset[position[1]]

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def collate(samples: list[Any], assemble: Callable[[list[Any]], Any] = default_collate) -> tuple[Any, Any, list[str]]:
    """(images, targets, complaints): the readable samples assembled, and a sentence for each unreadable one.

    Images and targets are None if no sample is readable.
    """
    complaints = [sample for sample in samples if isinstance(sample, str)]
    readable = [sample for sample in samples if not isinstance(sample, str)]
    images, targets = assemble(readable) if readable else (None, None)
    return images, targets, complaints


class Batches(DataLoader[Any]):
    """Batches (images, targets); up to max_corrupt unreadable samples are left out, with warnings for the first five.

    waited: seconds and share of the time of the latest pass, from its second batch on, in which no batch was ready.
    assemble: makes (images, targets) from a list of pairs; by default it stacks them. Raises ValueError, naming the
    first five, for more than max_corrupt, and if no sample can be read.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        max_corrupt: int = 0,
        assemble: Callable[[list[Any]], Any] = default_collate,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, batch_size, collate_fn=partial(collate, assemble=assemble), **kwargs)
        self.max_corrupt = max_corrupt
        self.complaints: dict[str, None] = {}
        self.waited = 0.0, 0.0

    def _timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; sets `waited`. Processes that read them start while the first is waited for."""
        seconds, begin, asked = 0.0, None, 0.0
        for batch in batches:
            now = time.perf_counter()
            seconds, begin = (0.0, now) if begin is None else (seconds + now - asked, begin)
            yield batch
            asked = time.perf_counter()
            self.waited = seconds, seconds / max(asked - begin, 1e-9)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch wants its own iterator
        before, met, any_usable = len(self.complaints), list[str](), False
        for images, targets, complaints in self._timed(super().__iter__()):
            met += complaints
            for complaint in complaints:
                if complaint in self.complaints:
                    continue
                self.complaints[complaint] = None
                count = len(self.complaints)
                if count > self.max_corrupt:
                    raise refusal(list(self.complaints), self.max_corrupt, "max_corrupt")
                if count <= SHOWN:
                    logger.warning("Left out (%d of at most %d): %s", count, self.max_corrupt, complaint)
            if images is not None:
                any_usable = True
                yield images, targets
        if met and not any_usable and self._is_whole():
            raise none_usable(list(dict.fromkeys(met)))
        if len(self.complaints) > max(before, SHOWN):
            count, limit = len(self.complaints), self.max_corrupt
            logger.warning(
                "%d samples were left out, of at most %d; the first %d are named above.", count, limit, SHOWN
            )

    def _is_whole(self) -> bool:
        """Whether this pass begins with the first sample."""
        return True


class ResumableBatches(Batches):
    """Training batches in a ShuffledOrder; `reached` is (epoch, batches read in it), and setting it resumes there."""

    sampler: ShuffledOrder

    def __init__(self, *args: Any, reached: tuple[int, int] = (0, 0), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = reached

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # This body runs at the first `next`, when the trainer has set the sampler's epoch.
        epoch, count = self.reached
        count = count if epoch == self.sampler.epoch and count < len(self) else 0
        self.sampler.skipped = count * (self.batch_size or 1)
        for batch in super().__iter__():
            count += 1
            self.reached = self.sampler.epoch, count
            yield batch

    def _is_whole(self) -> bool:
        return self.sampler.skipped == 0


class Streamed(Batches):
    """Training batches of a stream, shuffled differently in each epoch."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.dataset.set_epoch(self.epoch())  # type: ignore[attr-defined]
        yield from super().__iter__()
