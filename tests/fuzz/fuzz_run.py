"""A run that was trained for one step, once for each process, for cases that need one."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from fuzz_recipes import DIGITS

import linvit

HOME = tempfile.TemporaryDirectory(prefix="fuzz-")  # removed when the process ends


@cache
def tiny_folder() -> Path:
    recipe, folder = Path(HOME.name, "tiny.yaml"), Path(HOME.name, "run")
    recipe.write_text(yaml.safe_dump(DIGITS))
    linvit.train(recipe, folder=folder)
    return folder


@cache
def tiny_checkpoint() -> dict[str, Any]:
    return torch.load(tiny_folder() / "checkpoints" / "last.ckpt", weights_only=True)
