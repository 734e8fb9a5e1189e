"""The folder of a training: locked by one training at a time, and removed if the training fails early."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from linvit.errors import SettingError
from linvit.files import LOCK, locked, remove_leftovers

PATIENCE = 6.0  # seconds; data-loading processes keep the lock for about five seconds after a training was killed


@contextlib.contextmanager
def held(folder: Path, resume: bool) -> Iterator[None]:
    """Creates the folder and locks it; a training that fails before its first checkpoint leaves no files.

    Raises ValueError if another training has the lock, or, unless resumed, if the folder is not empty; OSError if it
    cannot be written.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    if not resume:
        _check_empty(folder)
    busy = f"Another training is running in {folder}: wait for it to end, or choose another `folder`."
    with locked(folder, busy, PATIENCE):
        before = set(folder.iterdir())
        try:
            if not resume:
                _check_empty(folder)  # another training may have run while this one waited
            remove_leftovers(folder, folder / "checkpoints")
            yield
        except BaseException:
            if not (folder / "checkpoints").exists():
                _remove(set(folder.iterdir()) - before)
            raise
        finally:
            if not any(path.name != LOCK for path in folder.iterdir()):
                (folder / LOCK).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another process has put a file there
                    for path in missing:
                        path.rmdir()


def _check_empty(folder: Path) -> None:
    if folder.is_dir() and any(path.name != LOCK for path in folder.iterdir()):
        raise SettingError(
            f"The run's folder {folder} is not empty: continue with `resume=True`, or choose another `folder`."
        )


def _remove(paths: set[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
