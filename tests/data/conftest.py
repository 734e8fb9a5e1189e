"""What tests of several sources share."""

import pytest


@pytest.fixture
def ranks(monkeypatch):
    """ranks(world) yields each rank; meanwhile images are ordered as for that one of so many processes."""

    def each(world):
        for rank in range(world):
            monkeypatch.setattr("linvit.data.order.replica", lambda rank=rank: (rank, world))
            yield rank

    return each
