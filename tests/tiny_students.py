"""Recipes of teachers and students that train in seconds on the real digits."""

from pathlib import Path

import pytest
from tiny_run import write_merged

import linvit

BASE = {"name": "deit_tiny_patch16_224", "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
STUDENT = {"name": "linearized", "base": BASE, "mechanism": "mala"}


def write_student_recipe(folder: Path, kind: str = "alignment", **groups) -> Path:
    """Two epochs of four batches, as folder/tiny.yaml; the run goes to folder/run."""
    values = {
        "folder": str(folder / "run"),
        "seed": 1,
        "model": BASE if kind == "classification" and "model" not in groups else STUDENT,
        "task": {"name": kind},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.0},
        "data": {"name": "digits", "batch_size": 16, "max_shift": 2},
        "trainer": {"max_epochs": 2, "accelerator": "cpu", "limit_train_batches": 4, "limit_val_batches": 2},
    }
    return write_merged(folder / "tiny.yaml", values, groups)


def refused(sentence: str, recipe: Path, *overrides: str, kind: type[Exception] = ValueError) -> None:
    """Trains a recipe, which must be refused with a sentence that has this pattern."""
    with pytest.raises(kind, match=sentence) as caught:
        linvit.train(recipe, overrides)
    assert len(str(caught.value).splitlines()) == 1
