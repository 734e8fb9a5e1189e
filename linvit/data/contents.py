"""What a data set contains, sample by sample, so that it can be counted before anything trains on it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Amounts = Mapping[int, int]


@dataclass(frozen=True)
class Content:
    """What one sample contains.

    size: (height, width) in pixels, (seconds,) of sound or (bytes,) of text. amounts: by what is counted ("images",
    "objects", "pixels"), the amount of each class. others: amounts that belong to no class, by what is counted.
    """

    size: tuple[float, ...]
    amounts: Mapping[str, Amounts] = field(default_factory=dict)
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
