"""Which image comes when: every random choice depends on (seed, epoch, index) alone, so a stopped run resumes exactly.

The number of worker processes that load the images makes no difference.
"""

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from linvit.ranges import Seed, check

Position = tuple[int, ...]
ROUND = 256
NAMED = 5  # unusable files that are named; the rest are counted

logger = logging.getLogger(__name__)


def check_seed(seed: Any, argument: str = "seed") -> None:
    """Raises ValueError for what no generator of random numbers takes."""
    check({argument: Seed}, {argument: seed})


def entropy(*numbers: int) -> int:
    """One well-mixed 32-bit seed from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def share() -> tuple[int, int]:
    """(rank, number of processes), (0, 1) outside distributed training."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


class ShuffledOrder(Sampler[Position]):
    """Positions (epoch, index), shuffled by (seed, epoch); each process takes every world-size-th position.

    With repeats above 1 (repeated augmentation, as timm's RepeatAugSampler): positions (epoch, index, copy), the copies
    of an image in a row, and an epoch ends after `length` of them, rounded down to a multiple of 256 as released.
    """

    def __init__(self, length: int, seed: int, repeats: int = 1) -> None:
        if repeats < 1:
            raise ValueError(f"`repeats` is {repeats}, expected 1 or more: set it to 1 or 3.")
        self.length = length
        self.seed = seed
        self.repeats = repeats
        self.epoch = 0
        self.skipped = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Position]:
        rank, world = share()
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
        return (self.length // ROUND * ROUND if rounded else self.length) // share()[1]


class GroupedOrder(ShuffledOrder):
    """A ShuffledOrder whose batches hold images of one group, such as wide or tall; what fills none comes last, mixed.

    groups: the group of each image. batch_size: images a batch of one process; groups are kept together over all.
    """

    def __init__(self, groups: Sequence[int], batch_size: int, seed: int) -> None:
        super().__init__(len(groups), seed)
        self.groups = groups
        self.batch_size = batch_size

    def shuffled(self, generator: torch.Generator) -> list[int]:
        order = super().shuffled(generator)
        together = self.batch_size * share()[1]
        batches, rest = [], []
        for group in sorted(set(self.groups)):
            members = [index for index in order if self.groups[index] == group]
            full = len(members) // together * together
            batches += [members[start : start + together] for start in range(0, full, together)]
            rest += members[full:]
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        mixed = [rest[place] for place in torch.randperm(len(rest), generator=generator).tolist()]
        return [index for number in shuffled for index in batches[number]] + mixed


class PlainOrder(Sampler[int]):
    """Indices in order; over several processes each index goes to exactly one of them, without padding."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        rank, world = share()
        return iter(range(rank, self.length, world))

    def __len__(self) -> int:
        rank, world = share()
        return len(range(rank, self.length, world))


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
    """Assembles the readable (image, target) pairs; what is a string is the complaint about an unreadable one."""
    complaints = [sample for sample in samples if isinstance(sample, str)]
    readable = [sample for sample in samples if not isinstance(sample, str)]
    images, targets = assemble(readable) if readable else (None, None)
    return images, targets, complaints


class Batches(DataLoader[Any]):
    """Batches (images, targets); up to max_corrupt unreadable images are left out, with warnings that name the first.

    assemble makes (images, targets) of a list of pairs; by default it stacks them. Raises ValueError, naming the file,
    for one more than max_corrupt.
    """

    def __init__(
        self,
        *args: Any,
        max_corrupt: int = 0,
        assemble: Callable[[list[Any]], Any] = default_collate,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, collate_fn=partial(collate, assemble=assemble), **kwargs)
        self.max_corrupt = max_corrupt
        self.complaints: dict[str, None] = {}

    def __iter__(self) -> Iterator[Any]:
        before = len(self.complaints)
        for images, targets, complaints in super().__iter__():
            for complaint in complaints:
                self._leave_out(complaint)
            if images is not None:
                yield images, targets
        if len(self.complaints) > max(before, NAMED):
            count, limit = len(self.complaints), self.max_corrupt
            logger.warning(
                "%d files have been left out, of at most %d; the first %d are named above.", count, limit, NAMED
            )

    def _leave_out(self, complaint: str) -> None:
        if complaint in self.complaints:
            return
        self.complaints[complaint] = None
        count = len(self.complaints)
        if count > self.max_corrupt:
            raise ValueError(f"{complaint} More than `max_corrupt`={self.max_corrupt}." if count > 1 else complaint)
        if count <= NAMED:
            logger.warning("Left out (%d of at most %d): %s", count, self.max_corrupt, complaint)


class ResumableBatches(Batches):
    """Training batches in a ShuffledOrder; `reached` is (epoch, batches read in it); setting it resumes there."""

    sampler: ShuffledOrder

    def __init__(self, *args: Any, reached: tuple[int, int] = (0, 0), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reached = reached

    def __iter__(self) -> Iterator[Any]:
        # This body runs at the first `next`, when the trainer has set the sampler's epoch.
        epoch, count = self.reached
        count = count if epoch == self.sampler.epoch and count < len(self) else 0
        self.sampler.skipped = count * (self.batch_size or 1)
        for batch in super().__iter__():
            count += 1
            self.reached = self.sampler.epoch, count
            yield batch


class Streamed(Batches):
    """Training batches of a stream, shuffled differently in each epoch."""

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        self.dataset.set_epoch(self.epoch())  # type: ignore[attr-defined]
        yield from super().__iter__()
