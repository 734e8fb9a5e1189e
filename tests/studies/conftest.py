"""What tests of plans share."""

import pytest

from linvit.studies.plan import Times


@pytest.fixture
def long_softmax(monkeypatch):
    """Times as on long sequences: softmax attention takes longer in all layers but the last."""
    gains = (5.0, 0.5, -1.0)

    def of_layers(times, hybrid):
        return {lesson.layer: (10, 10 - gains[place]) for place, [lesson] in hybrid.letters.items()}

    def of_patterns(times, hybrid, patterns):
        return {pattern: 40 - 5 * pattern.count("L") for pattern in patterns}

    monkeypatch.setattr(Times, "of_layers", of_layers)
    monkeypatch.setattr(Times, "of_patterns", of_patterns)
