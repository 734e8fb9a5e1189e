"""Plays one generated case in a folder of its own, and says what is wrong with how it ended."""

import contextlib
import gc
import io
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hostile import HangError, limits

from linvit_cli import main

SECONDS, GIB = 90, 2**30
MEMORY = 6 * GIB  # above what the process has
LINES, LONGEST = 14, 600
ENDS = (0, 1, 2, 130)
RAW = (
    "Traceback", "Union[", "Union subtypes", "jsonargparse", "Parser key", "NoneType", "object has no attribute",
    "positional argument", "Errno", ".tmp", "<class '",
)  # fmt: skip
"""What no sentence for a user contains."""
USER_ERRORS = (ValueError, TypeError, OSError, FloatingPointError, ImportError)
EVIL, MARK = "evil.py", "code_of_the_recipe_ran"


@dataclass(frozen=True)
class Case:
    """What a user does in an empty folder.

    shown: how the case reads in a report. act: does it there and returns the exit code. wrong: whether it is plainly a
    mistake, so that it must not end with 0. apart: whether it is played in a process of its own, because libraries in
    C++ may end it, or not end. may_abort: whether that is known of the library.
    """

    shown: str
    act: Callable[[Path], int]
    wrong: bool = False
    apart: bool = False
    may_abort: bool = False

    def __repr__(self) -> str:
        return self.shown


def command(*arguments: str) -> int:
    """The exit code of a linvit command in this process."""
    try:
        return main(list(arguments))
    except SystemExit as ended:  # argparse
        return ended.code if isinstance(ended.code, int) else 1


def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> int:
    """0 where a Python call works, else 2 and its sentence on stderr; other exceptions than a user's pass through."""
    try:
        function(*arguments, **named)
    except USER_ERRORS as error:
        print(f"linvit: {error}", file=sys.stderr)
        return 2
    return 0


def trouble(case: Case, folder: Path) -> str | None:
    """What is wrong with how a case ended, None where it ended well; the folder is new and empty."""
    if not case.apart:
        return _trouble(case, folder)
    child = os.fork()
    if child == 0:
        gc.freeze()  # or collecting copies all memory
        torch.set_num_threads(1)  # pools of threads do not survive a fork
        try:
            (folder / "wrong").write_text(_trouble(case, folder) or "")
        finally:
            os._exit(0)
    deadline = time.monotonic() + 1.5 * SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return f"hang: longer than {SECONDS} s in a library"
    if ended[1] and case.may_abort:
        return None
    if ended[1]:
        return f"abort: signal {-os.waitstatus_to_exitcode(ended[1])}"
    return (folder / "wrong").read_text() or None


def _trouble(case: Case, folder: Path) -> str | None:
    work, evil = folder / "work", folder / "modules"
    work.mkdir()
    evil.mkdir()
    (evil / EVIL).write_text(f"open({str(folder / MARK)!r}, 'w').close()\nclass X: pass\ndef f(*a, **k): pass\n")
    before = _held()
    ended = ""
    code: int | None = None
    with _streams() as said, _inside(work, evil), limits(SECONDS, MEMORY):
        try:
            code = case.act(work)
        except HangError:
            ended = f"hang: longer than {SECONDS} s"
        except BaseException as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            ended = f"traceback: {type(error).__name__} in {Path(place.filename).name}: {str(error)[:160]}"
    text = said.getvalue()
    return (
        ended
        or ("ran code: a module that a file named was imported" if (folder / MARK).exists() else None)
        or _of_end(code, case.wrong)
        or _of_words(code, text)
        or _of_leftovers(folder, before)
    )


def _of_end(code: int | None, wrong: bool) -> str | None:
    if code not in ENDS:
        return f"exit code: {code}"
    return "silent success: a mistake ended with 0" if wrong and code == 0 else None


def _of_words(code: int | None, text: str) -> str | None:
    if code == 0:
        return None
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return "words: nothing was said"
    raw = next((word for word in RAW if word in text), None)
    if raw is not None:
        return f"words: {raw!r} in {next(line for line in lines if raw in line)[:200]!r}"
    if len(lines) > LINES and not lines[0].startswith("usage"):
        return f"words: {len(lines)} lines, the first {lines[0][:120]!r}"
    longest = max(lines, key=len)
    return f"words: a line of {len(longest)} characters: {longest[:120]!r}" if len(longest) > LONGEST else None


def _held() -> tuple[set[Any], int]:
    """Threads and processes, and the number of open files."""
    held = {*threading.enumerate(), *multiprocessing.active_children()}
    return held, len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _of_leftovers(folder: Path, before: tuple[set[Any], int]) -> str | None:
    gc.collect()
    children = set(multiprocessing.active_children()) - before[0]
    if children:
        return f"leak: {len(children)} processes"
    threads = [thread for thread in set(threading.enumerate()) - before[0] if not thread.daemon]
    for thread in threads:
        thread.join(1)
    alive = [thread.name for thread in threads if thread.is_alive()]
    if alive:
        return f"leak: threads {alive}"
    if _held()[1] > before[1] + 20:
        return f"leak: {_held()[1] - before[1]} open files"
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in ("work", "modules", "home"))
    if strangers:
        return f"leak: written outside its folder: {strangers}"
    temporary = [str(path.relative_to(folder)) for path in (folder / "work").rglob(".*.tmp")]
    return f"leak: temporary files {temporary}" if temporary else None


@contextlib.contextmanager
def _streams() -> Iterator[io.StringIO]:
    """Standard output and error of the case; what is yielded gets the text of the second one at the end."""
    error = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    output = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    text = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(error):
        yield text
    error.flush()
    text.write(error.buffer.getvalue().decode("utf-8"))  # type: ignore[attr-defined]


@contextlib.contextmanager
def _inside(work: Path, modules: Path) -> Iterator[None]:
    """The folder as the current one and as home, with a module beside it that nobody may import."""
    home = work.parent / "home"
    home.mkdir()
    there, variables = os.getcwd(), dict(os.environ)
    os.environ |= {"HOME": str(home), "HF_HUB_OFFLINE": "1"}
    sys.path.insert(0, str(modules))
    os.chdir(work)
    try:
        yield
    finally:
        os.chdir(there)
        sys.path.remove(str(modules))
        sys.modules.pop("evil", None)
        os.environ.clear()
        os.environ.update(variables)
