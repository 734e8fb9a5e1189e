"""How long the rest takes."""

import time
from collections.abc import Callable, Sequence

INTERVAL = 5.0  # seconds between lines


class Clock:
    """Says after each few seconds which step is computed and how long all others will take.

    work: of each step, in any unit. first: the number of the first step that is not complete yet. say: called with a
    line.
    """

    def __init__(self, work: Sequence[float], first: int, say: Callable[[str], object]) -> None:
        self._work, self._first, self._say = work, first, say
        self._began = self._last = time.monotonic()

    def tick(self, number: int, name: str, share: float) -> None:
        """A share of a step is complete."""
        now = time.monotonic()
        if now - self._last < INTERVAL:
            return
        self._last = now
        done = sum(self._work[self._first : number]) + share * self._work[number]
        left = (sum(self._work[self._first :]) - done) * (now - self._began) / max(done, 1e-9)
        words = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min"
        self._say(f"{name} ({number + 1} of {len(self._work)} steps); about {words} left")
