"""Progress outside of trainings: a bar on a terminal, log lines elsewhere."""

import io
import logging
import sys
from types import SimpleNamespace

import pytest

from linvit.runs import progress
from linvit.runs.progress import Speed, tracked


@pytest.mark.parametrize(("items", "said"), [([1, 2, 3], "2 of 3"), (iter((1, 2, 3)), "2")])
def test_a_pipe_gets_a_line_now_and_then(items, said, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    assert list(tracked(items, "rank")) == [1, 2, 3]
    assert f"rank: {said} done" in caplog.messages


@pytest.mark.parametrize("shown", [True, False])
def test_short_work_says_nothing(shown, caplog):
    caplog.set_level(logging.INFO)
    assert list(tracked([1, 2], "rank", progress=shown)) == [1, 2]
    assert caplog.messages == []


def test_a_description_is_shown_as_it_is(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(tracked([1], "a [/b] c")) == [1]
    assert "a [/b] c" in terminal.getvalue()


@pytest.mark.parametrize(("speed", "words"), [(None, ""), (4.0, "4.00 step/s"), (0.04, "25.0 s/step")])
def test_slow_steps_are_shown_in_seconds(speed, words):
    assert str(Speed().render(SimpleNamespace(speed=speed))) == words
