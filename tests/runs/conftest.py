import pytest


@pytest.fixture
def on_macos(monkeypatch):
    """Lets Core ML run from the call on, computed by torch."""

    def pretend():
        import coreml_stand_in  # which takes seconds to import

        coreml_stand_in.on_macos(monkeypatch)

    return pretend
