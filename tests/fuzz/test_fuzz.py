"""2,000 generated mistakes (200 in the quick tests): none ends in a traceback, a hang, a leak or silent success."""

from collections.abc import Iterator

import pytest
from fuzz_cases import KINDS, tiny_checkpoint
from fuzz_play import trouble
from hypothesis import HealthCheck, Phase, given, settings

QUICK = 10  # one in so many of the cases


def failures(kind: str, count: int, folders: Iterator) -> list[str]:
    """One line for each of so many cases that ended badly."""
    strategy, _ = KINDS[kind]
    tiny_checkpoint()  # trains, which a strategy must not: it seeds the generators
    ended = []

    @settings(
        max_examples=count,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def play(case):
        wrong = trouble(case, next(folders))
        if wrong is not None:
            ended.append(f"{case}: {wrong}")

    play()
    return ended


@pytest.fixture
def folders(tmp_path):
    """New empty folders, one after the other."""

    def new():
        for number in range(10**6):
            folder = tmp_path / str(number)
            folder.mkdir()
            yield folder

    return new()


@pytest.mark.parametrize("kind", KINDS)
def test_some_mistakes(kind, folders):
    assert failures(kind, KINDS[kind][1] // QUICK, folders) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_mistakes(kind, folders):
    assert failures(kind, KINDS[kind][1], folders) == []
