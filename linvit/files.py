"""Files: written atomically, and read without running code."""

import argparse
import contextlib
import csv
import io
import json
import math
import os
import pickle
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from safetensors.torch import load_file

from linvit.errors import refuse

TEMPORARY = re.compile(r"\..+\.\d+\.tmp")
LOCK = ".lock"
LAST, BEST = "last.ckpt", "best.ckpt"  # in the folder checkpoints of a run


def user_path(path: str | Path) -> Path:
    """Expands `~` to the home folder, in every path that a user gives; raises ValueError for NUL characters."""
    if "\0" in str(path):
        raise ValueError(f"The path {str(path)!r} has a NUL character, which no file name can have: give another path.")
    return Path(os.path.expanduser(path))


def weights_file(source: str | Path) -> Path:
    """The weight file: a run's best checkpoint, otherwise its last one, or the file itself."""
    path = user_path(source)
    if not path.is_dir():
        return path
    best, last = (path / "checkpoints" / name for name in (BEST, LAST))
    return last if last.is_file() and not best.is_file() else best


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Yields a temporary path; on success the file written there replaces path atomically.

    Links are followed, and missing folders are created.

    Raises:
        ValueError: if path exists and is not a regular file.
        OSError: if it cannot be written; the message names path, and `errno` is the system's.
    """
    path = user_path(path)
    _check_regular(path)
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{_shortened(target.name)}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors lets only the owner read what it writes
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, target)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary), *map(str, target.parents)):
            raise
        reason = os.strerror(error.errno)
        raised = OSError(
            f"{path} could not be written ({reason}): make room or allow writing there, or choose another."
        )
        raised.errno = error.errno
        raise raised from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: str | Path, content: Any, indent: int | None = None) -> None:
    """Writes content as JSON, atomically; NaN and infinities, which JSON does not have, become null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(_finite(content), indent=indent))


def write_csv(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes `csv_text` of rows, atomically."""
    write_text(path, csv_text(rows))


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV with a header; a column for each key, in the order of their first rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_text(path: str | Path, text: str) -> None:
    """Writes text in UTF-8, atomically.

    Bytes of file names that are not UTF-8 (Python's surrogates) are written as `\\udcXX`, in JSON a valid escape.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def check_output_file(path: str | Path, endings: Sequence[str] = ()) -> Path:
    """Returns the expanded path; raises ValueError or OSError if no file can be written there.

    endings: those that the path of a setting `output` may have, as in (".csv", ".json"); any if there are none.
    """
    path = user_path(path)
    wrong = endings and path.suffix.lower() not in endings
    refuse(wrong and f"`output` is {path}, expected a {' or '.join(endings)} file: change the ending.")
    _check_regular(path)
    check_writable(path.parent)
    return path


def check_writable(folder: str | Path) -> None:
    """Creates the folder if it is missing; raises OSError if files cannot be written there."""
    folder = user_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else reason_of(error)
        raise OSError(
            f"The folder {folder} cannot be written ({reason}): allow writing there, or choose another folder."
        ) from error


@contextlib.contextmanager
def locked(folder: Path, busy: str, patience: float = 0.0) -> Iterator[None]:
    """Creates the folder and holds its lock; waits for another process that has it so many seconds.

    Raises ValueError, whose text is `busy`, if that has not released it; OSError if the folder cannot be written.
    """
    check_writable(folder)
    _check_regular(folder / LOCK)
    try:
        lock = FileLock(folder / LOCK).acquire(timeout=patience)
    except Timeout as error:
        raise ValueError(busy) from error
    with lock:
        yield


def remove_leftovers(*folders: Path) -> None:
    """Deletes temporary files that killed processes left in these folders."""
    for folder in folders:
        for path in folder.glob(".*.tmp"):
            if TEMPORARY.fullmatch(path.name):
                path.unlink(missing_ok=True)


def reason_of(error: Exception) -> str:
    """The first line of an error's message; the error's type if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")


@contextlib.contextmanager
def explained(
    sentence: str | Callable[[str], str],
    kinds: type[Exception] | tuple[type[Exception], ...] = Exception,
    raised: type[Exception] = ValueError,
) -> Iterator[None]:
    """Raises exceptions of these kinds as `raised` with a sentence, which is given or made from the error's reason."""
    try:
        yield
    except kinds as error:
        raise raised(sentence if isinstance(sentence, str) else sentence(reason_of(error))) from error


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The contents of a .pth, .ckpt or .safetensors file, on the CPU; reading runs no code.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is truncated, is not a checkpoint, contains objects that only running code could make, or
            has weights that are complex or without names.
    """
    path = user_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"The checkpoint {path} does not exist: give the path of a checkpoint file.")
    try:
        if path.suffix == ".safetensors":
            checkpoint = load_file(path)
        else:  # the authors' training script saves its arguments next to the weights
            with torch.serialization.safe_globals([argparse.Namespace]):
                checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"The checkpoint {path} is refused because it is damaged or reading it could execute code"
            f"{f' ({refused[1]})' if refused else ''}: save only its state dict, which contains just tensors."
        ) from error
    except Exception as error:  # what a damaged file raises depends on where it is cut
        raise ValueError(f"Checkpoint {path} cannot be read, it is probably truncated: use another copy.") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(
            f"{path} contains a {type(checkpoint).__name__}, expected a dictionary of tensors: give a checkpoint."
        )
    for entries in (checkpoint, checkpoint.get("state_dict"), checkpoint.get("model")):
        for key, value in entries.items() if isinstance(entries, Mapping) else ():
            if not isinstance(key, str) or (isinstance(value, torch.Tensor) and value.is_complex()):
                what = "a complex tensor" if isinstance(key, str) else "a name that is not text"
                raise ValueError(f"{path} contains {what} ({str(key)[:60]!r}), expected real weights: give others.")
    return checkpoint


def _check_regular(path: Path) -> None:
    """Raises ValueError if the path exists and is not a regular file, which must not be replaced."""
    if path.exists() and not path.is_file():
        present = "a folder" if path.is_dir() else "a device, pipe or socket"
        raise ValueError(f"{path} is {present}, not a file: name a file.")


def _shortened(name: str) -> str:
    """Shortens long names, so that an ending can be added."""
    return name if len(os.fsencode(name)) < 200 else f"{name[:40]}{zlib.crc32(os.fsencode(name))}"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
