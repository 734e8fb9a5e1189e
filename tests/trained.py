"""Runs that many tests read: each recipe is trained once, whichever file and process asks for it first."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock
from tiny_run import write_recipe

from linvit.runs.training import train_folder

ONE_EPOCH = {"max_epochs": 1}


def trained_run(factory: pytest.TempPathFactory, write=write_recipe, **groups) -> Path:
    """The folder of the run of `write(folder, **groups)`, to be read only: copy it to change it."""
    digest = hashlib.sha256(json.dumps([write.__name__, groups], sort_keys=True).encode()).hexdigest()[:16]
    folder = _of_all_processes(factory) / f"run-{digest}"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            train_folder(write(folder, **groups))
            (folder / "complete").touch()
    return folder / "run"


def _of_all_processes(factory: pytest.TempPathFactory) -> Path:
    """The folder below which the processes of xdist have theirs."""
    own = factory.getbasetemp()
    return own.parent if own.name.startswith("popen-") else own
