"""What a run of each task can do, and what `import linvit` offers."""

import inspect

import pytest

import linvit
from linvit.bundled import bundled_files
from linvit.layers.mechanisms import MECHANISMS
from linvit.runs.tasks import RUNS

VERBS = {"analyze", "generate", "predict", "push_to_hub", "save_weights", "stream", "transcriber"}
"""The methods that not every task has."""
OF_TASK = {
    "classification": {"analyze", "predict", "push_to_hub", "save_weights"},
    "multilabel": {"analyze", "predict"},
    "detection": {"analyze", "predict"},
    "segmentation": {"analyze", "predict"},
    "language": {"generate"},
    "recall": set(),
    "diffusion": {"analyze", "generate"},
    "speech": {"predict", "stream", "transcriber"},
    "alignment": {"analyze", "predict"},
    "transfer": {"analyze", "predict"},
}


def test_a_task_has_the_methods_that_it_supports_and_no_others():
    assert {task: {verb for verb in VERBS if hasattr(run, verb)} for task, run in RUNS.items()} == OF_TASK


@pytest.mark.parametrize("task", RUNS)
def test_methods_name_their_options(task):
    for verb in OF_TASK[task] - {"analyze", "push_to_hub", "save_weights"}:
        options = inspect.signature(getattr(RUNS[task], verb)).parameters.values()
        assert all(p.kind is not p.VAR_KEYWORD for p in options), verb


def test_every_public_name_can_be_imported():
    assert all(getattr(linvit, name) for name in linvit.__all__)


def test_mechanisms_and_recipes_are_listed_by_a_pattern():
    assert linvit.list_mechanisms() == list(MECHANISMS)
    assert linvit.list_mechanisms("*rala") == ["rala"]
    assert linvit.list_recipes() == list(bundled_files())
    assert "demo/ravlt_nano_digits" in linvit.list_recipes("demo/*")
