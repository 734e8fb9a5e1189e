import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import yaml
from tiers import quick
from tiny_dense import tiny_scenes, write_dense_recipe
from tiny_diffusion import write_diffusion_recipe
from tiny_language import write_language_recipe
from tiny_run import At, content, differing, press_ctrl_c, write_recipe
from tiny_speech import write_speech_recipe
from tiny_students import write_student_recipe

from linvit.environment import using_threads
from linvit.runs import loading
from linvit.runs.folder import RunStoppedError
from linvit.runs.threads import ChoosesThreads, WatchesEpochs, fastest, measured
from linvit.runs.training import train_folder
from linvit_cli.run_arguments import load


@pytest.fixture(autouse=True)
def two_threads():
    with using_threads(2):
        yield


@pytest.fixture
def preferring(monkeypatch):
    """Makes a number of threads the fastest one, whatever this machine is busy with."""

    def prefer(number):
        times = {1: 0.2, 2: 0.4} if number == 1 else {1: 0.4, 2: 0.2}
        monkeypatch.setattr("linvit.runs.threads.median", lambda taken: times[torch.get_num_threads()])

    return prefer


@pytest.mark.parametrize(
    ("seconds", "number"),
    [
        ({1: 1.0}, 1),
        ({1: 1.0, 2: 0.8}, 1),
        ({1: 1.0, 2: 0.6, 4: 0.5}, 2),
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1, 2: 9}, 1),
    ],
)
def test_more_threads_are_used_where_they_are_clearly_faster(seconds, number):
    assert fastest(seconds) == number


@pytest.mark.parametrize(("best", "tried"), [(1, [1, 2]), (2, [1, 2, 4]), (4, [1, 2, 4, 6]), (6, [1, 2, 4, 6])])
def test_numbers_of_threads_are_tried_until_one_is_no_faster(monkeypatch, best, tried):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def step():
        now[0] += 2.0 ** abs(torch.get_num_threads() - best)

    assert list(measured(step, 6)) == tried


def test_the_step_that_is_not_measured_has_one_thread(monkeypatch):
    threads = []
    task = SimpleNamespace(rehearse=lambda batch: threads.append(torch.get_num_threads()))
    trainer = SimpleNamespace(precision_plugin=SimpleNamespace(train_step_context=nullcontext))
    monkeypatch.setattr("linvit.runs.threads.measured", lambda step, most: {1: 0.1, most: 0.2})
    ChoosesThreads(threads.append).on_train_batch_start(trainer, task, None, 0)
    assert threads == [1, 1]  # of the step, and the choice


@pytest.mark.parametrize(("threads", "told"), [(2, [3]), (1, [])])
def test_an_epoch_that_other_work_slows_is_told_once(monkeypatch, caplog, threads, told):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watcher = WatchesEpochs()
    with using_threads(threads):
        for epoch, seconds in enumerate((2.4, 2.0, 6.1, 30.0)):
            trainer = SimpleNamespace(current_epoch=epoch)
            watcher.on_train_epoch_start(trainer, None)
            now[0] += seconds
            watcher.on_train_epoch_end(trainer, None)
    lines = [f"Epoch {epoch} took 6.1 s, an earlier one 2.0 s, with 2 threads" for epoch in told]
    assert [message.partition(":")[0] for message in caplog.messages] == lines


@pytest.mark.parametrize("number", quick([1, 2], [1]))
def test_a_measured_run_equals_one_with_these_threads_also_when_resumed(preferring, tmp_path, number):
    preferring(number)
    recipe, used, run = write_recipe(tmp_path), [], tmp_path / "run"
    with pytest.raises(RunStoppedError):
        train_folder(recipe, callbacks=[At(3, press_ctrl_c)])
    assert content(run)["linvit"]["recipe"]["trainer"]["threads"] == number
    preferring(3 - number)
    look = At(5, lambda *_: used.append(torch.get_num_threads()))
    train_folder(recipe, resume=True, callbacks=[look])
    assert used == [number]
    assert torch.get_num_threads() == 2
    written = yaml.safe_load((run / "recipe.yaml").read_text())
    assert written["trainer"]["threads"] == number
    given = train_folder(recipe, {"trainer.threads": number}, folder=tmp_path / "given")
    assert differing(given, run) == []


def write_detector_recipe(folder):
    return write_dense_recipe(folder, tiny_scenes(folder / "scenes"), "retinanet")


@pytest.mark.slow
@pytest.mark.parametrize(
    "write",
    [write_detector_recipe, write_diffusion_recipe, write_language_recipe, write_speech_recipe, write_student_recipe],
)
def test_no_task_is_changed_by_measuring(preferring, tmp_path, write):
    preferring(1)
    recipe = write(tmp_path)
    run = train_folder(recipe, {"trainer.max_epochs": 1})
    given = train_folder(recipe, {"trainer.max_epochs": 1, "trainer.threads": 1}, folder=tmp_path / "given")
    assert differing(given, run, fewest=50) == []


@pytest.mark.parametrize(
    ("trainer", "number"), [({"threads": 1}, 1), ({"threads": 8}, 2), ({"threads": None}, 2), ({}, 2)]
)
def test_the_command_line_computes_with_the_threads_of_the_training(trainer, number, monkeypatch):
    monkeypatch.setattr(loading, "load_run", lambda *_, **__: SimpleNamespace(recipe={"trainer": trainer}))
    with using_threads(2):
        load(SimpleNamespace(model=None, checkpoint=None), "runs/my")
        assert torch.get_num_threads() == number
