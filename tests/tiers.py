"""Quick and slow tests: what `make test` leaves to `make test-slow`."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """These values of a parametrized test, for the slow tests only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def quick(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """All values of a parametrized test; the chosen ones are among the quick tests too."""
    chosen = list(chosen)
    return [value if value in chosen else slow(value)[0] for value in values]
