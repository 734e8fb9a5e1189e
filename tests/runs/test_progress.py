"""Progress outside of trainings: a bar on a terminal, log lines elsewhere."""

import io
import logging
import re
import sys
from types import SimpleNamespace

import pytest
from tiny_run import write_recipe

from linvit.runs import progress
from linvit.runs.progress import Speed, remedies, tracked, waiting
from linvit.runs.training import train_folder


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


def training(waited, workers=0, augment_on="cpu", device="cuda"):
    source = SimpleNamespace(num_workers=workers, augment_on=augment_on)
    strategy = SimpleNamespace(root_device=SimpleNamespace(type=device))
    return SimpleNamespace(train_dataloader=SimpleNamespace(waited=waited), datamodule=source, strategy=strategy)


@pytest.mark.parametrize(
    ("waited", "words"), [((60.0, 0.451), "45 %"), ((60.0, 0.3), ""), ((1.9, 0.9), ""), ((0.0, 0.0), "")]
)
def test_a_training_that_waits_for_data_says_so(waited, words):
    assert waiting(training(waited)) == words


def test_what_makes_data_come_faster(monkeypatch):
    monkeypatch.setattr(progress, "usable_cores", lambda: 4)
    long = (60.0, 0.5)
    assert remedies(training(long)) == "more data.num_workers or data.augment_on=device"
    assert remedies(training(long, workers=4)) == "data.augment_on=device"
    assert remedies(training(long, device="cpu")) == "more data.num_workers"
    assert remedies(training(long, workers=4, augment_on="device")) == ""


def test_the_line_of_an_epoch_names_the_wait(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "usable_cores", lambda: 4)
    monkeypatch.setattr(progress, "WAITING", -1.0)
    monkeypatch.setattr(progress, "BRIEFLY", -1.0)
    train_folder(write_recipe(tmp_path, trainer={"max_epochs": 1, "threads": 1}), progress=True)
    assert re.search(r" s, waiting for data \d+ %: more data\.num_workers\n", capsys.readouterr().out)
