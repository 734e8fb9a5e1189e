"""How long the rest takes."""

import time
from collections.abc import Callable, Sequence

INTERVAL = 5.0  # seconds between lines


class Clock:
    """Says after each few seconds which step is computed and how long all others will take.

    work: of each step, in any unit. say: called with a line.
    """

    def __init__(self, work: Sequence[float], say: Callable[[str], object]) -> None:
        self._work, self._say = work, say
        self._began = self._last = time.monotonic()
        self._before = 0.0

    def skip(self, number: int) -> None:
        """A step was complete already."""
        self._before += self._work[number]

    def tick(self, number: int, name: str, share: float) -> None:
        """A share of a step is complete."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return
        self._last = now
        done = sum(self._work[:number]) + share * self._work[number] - self._before
        left = (sum(self._work) - self._before - done) * (now - self._began) / max(done, 1e-9)
        self._say(f"{name} ({number + 1} of {len(self._work)} steps); about {_words(left)} left")


def _words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
