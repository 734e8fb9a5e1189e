"""Files on disk: written whole or not at all, read without running code; and why a file was not read."""

import argparse
import contextlib
import json
import math
import os
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TEMPORARY = re.compile(r"\..+\.\d+\.tmp")


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Gives a temporary name beside path; what was written there takes path's place at once, or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | Path, content: Any, indent: int | None = None) -> None:
    """Writes content as JSON, whole or not at all; NaN and infinities, which JSON does not know, become null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(content), indent=indent))


def check_writable(folder: Path) -> None:
    """Raises OSError, naming the folder, where no file can be made in it; makes the folder where it is missing."""
    try:
        with replacing(folder / ".probe") as temporary:
            temporary.touch()
        (folder / ".probe").unlink()
    except OSError as error:
        raise OSError(
            f"The folder {folder} cannot be written ({error.strerror}): allow writing there, or choose another folder."
        ) from error


def remove_leftovers(*folders: Path) -> None:
    """Deletes what a process that was killed in the middle of `replacing` left in these folders."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


def reason_of(error: Exception) -> str:
    """The first line of an error's message, else the error's type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a .pth, .ckpt or .safetensors file, on the CPU, read without executing code.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is truncated, is not a checkpoint, or holds objects that only running code could make.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist: give the path of a checkpoint's file")
    try:
        checkpoint = load_file(path) if path.suffix == ".safetensors" else _load_pickle(path)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"checkpoint {path} is refused because it is damaged or reading it could execute code"
            f"{f' ({refused[1]})' if refused else ''}: expected plain tensors and values, save its state dict alone"
        ) from error
    except Exception as error:  # what a damaged file raises depends on where it is cut
        raise ValueError(f"checkpoint {path} cannot be read, it is probably truncated: use another copy") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {path} holds a {type(checkpoint).__name__}, expected a dictionary of tensors")
    return checkpoint


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _load_pickle(path: Path) -> Any:
    # The authors' training script saves its arguments beside the weights.
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True)
