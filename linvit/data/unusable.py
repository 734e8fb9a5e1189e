"""Items of a data set that cannot be used: one sentence per item, of which the first five are shown."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

SHOWN = 5

logger = logging.getLogger(__name__)
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Yields a list that gets the sentences of all items left out meanwhile, whatever the limits are."""
    sentences: list[str] = []
    token = _collected.set(sentences)
    try:
        yield sentences
    finally:
        _collected.reset(token)


def shown(sentences: Sequence[str]) -> str:
    """The first five sentences, one per line, and the number of the others."""
    more = len(sentences) - SHOWN
    return "\n  ".join([*sentences[:SHOWN], *([f"and {more:,} more."] if more > 0 else [])])


def refusal(sentences: Sequence[str], limit: int, argument: str) -> ValueError:
    """The error for more unusable items than `argument` allows."""
    first, *others = shown(sentences).split("\n", 1)
    more = f" More than `{argument}`={limit}." if limit or others else ""
    return ValueError("\n".join([first + more, *others]))


def none_usable(sentences: Sequence[str], item: str = "sample") -> ValueError:
    """The error for data of which nothing can be used, even if all may be left out."""
    return ValueError(f"None of the {len(sentences):,} {item}s can be used:\n  {shown(sentences)}")


def allow(sentences: Sequence[str], limit: int, argument: str) -> None:
    """Warns of the items that are left out; raises ValueError if they are more than limit, the value of `argument`."""
    collected = _collected.get()
    if collected is not None:
        collected += sentences
        return
    if len(sentences) > limit:
        raise refusal(sentences, limit, argument)
    if sentences:
        logger.warning("Left out (%d of at most %d): %s", len(sentences), limit, shown(sentences))
