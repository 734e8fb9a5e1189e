from pathlib import Path

import pytest
from trained import ONE_EPOCH, trained_run


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The folder of a classifier's run of one epoch, to be read only."""
    return trained_run(tmp_path_factory, trainer=ONE_EPOCH)


@pytest.fixture
def on_macos(monkeypatch):
    """Lets Core ML run from the call on, computed by torch."""

    def pretend():
        import coreml_stand_in  # which takes seconds to import

        coreml_stand_in.on_macos(monkeypatch)

    return pretend
