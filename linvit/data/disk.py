"""Files of a data set on disk: only regular files are opened, hidden ones are ignored, text is UTF-8.

What cannot be used is said in a sentence for each item, of which the first five are shown.
"""

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from linvit.errors import SettingError
from linvit.files import explained, user_path

SHOWN = 5

logger = logging.getLogger(__name__)
_collected: ContextVar[list[str] | None] = ContextVar("collected", default=None)


def check_regular(path: str | Path) -> None:
    """Raises OSError, whose text says why, for anything but a regular file or a link to one.

    Opening a named pipe waits until somebody writes to it, and a device may have no end.
    """
    if not os.path.isfile(path):
        other = "it is a pipe, a socket or a device, not a regular file"
        other = "it is a folder" if os.path.isdir(path) else other
        raise OSError(other if os.path.exists(path) else "there is no such file")


def data_folder(root: str | Path, expected: str = "another folder") -> Path:
    """The folder of a data set that a user names; raises SettingError if there is none. expected: what it should be."""
    path = user_path(root)
    if not path.is_dir():
        wrong = "is a file" if path.exists() else "does not exist"
        raise SettingError(f"The data folder {path} {wrong}: set `root` to {expected}.")
    return path


def is_hidden(path: Path, root: Path) -> bool:
    """Whether a file, or a folder between it and root, has a name that begins with a dot."""
    return any(name.startswith(".") for name in path.relative_to(root).parts)


def files_below(folder: Path, suffixes: Iterable[str], others: Counter[str] | None = None) -> list[Path]:
    """The paths with one of these endings (".jpg", in either case) at any depth, sorted; hidden ones are left out.

    others: gets the number of the files with each other ending.
    """
    endings = {suffix.lower() for suffix in suffixes}
    paths: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible = [*folders, *(name for name in names if not name.startswith("."))]
        paths += [Path(place, name) for name in visible if os.path.splitext(name)[1].lower() in endings]
        if others is not None:
            given = (os.path.splitext(name)[1].lower() for name in visible[len(folders) :])
            others.update(ending for ending in given if ending not in endings)
    return sorted(paths)


def files_by_name(folder: Path, suffixes: Iterable[str], complaints: list[str]) -> dict[str, Path]:
    """The files of a folder with these endings by their names without ending, sorted; a complaint for a second file of
    the same name. Hidden files are left out."""
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("[!.]*")):
        if path.suffix.lower() in suffixes and files.setdefault(path.stem, path) != path:
            complaints.append(f"{path} has the name of {files[path.stem].name}: remove one of them.")
    return files


def say_unread(folder: Path, others: Counter[str], kind: str = "image") -> None:
    """Warns of the files of a folder that are not read because of their endings."""
    if others:
        counts = [f"{count:,} {ending or 'without an ending'}" for ending, count in others.most_common(9)]
        logger.warning("Not read as %ss in %s, because of their endings: %s", kind, folder, ", ".join(counts))


def stays_inside(name: str) -> bool:
    """Whether a file name from a table or annotations is a path inside their folder."""
    parts = (PurePosixPath(name), PureWindowsPath(name))
    return bool(name) and "\0" not in name and not any(path.anchor or ".." in path.parts for path in parts)


def read_text(path: Path) -> str:
    r"""The text of a file in UTF-8, without its byte order mark; lines end in "\n".

    Raises ValueError, naming the file, if it cannot be read or is not UTF-8.
    """
    try:
        check_regular(path)
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: save it again as UTF-8.") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): replace the file.") from error
    if "\0" in text:  # as in UTF-16 without a byte order mark
        raise ValueError(f"{path} has NUL characters, so it is not text in UTF-8: save it again as UTF-8.")
    return text


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not empty, without spaces around them; raises as read_text does."""
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


def read_json(path: Path) -> Any:
    """The content of a JSON file in UTF-8; raises ValueError, naming the file, if it cannot be read."""
    text = read_text(path)
    with explained(
        lambda reason: f"{path} is not complete JSON ({reason}): use another copy.", (ValueError, RecursionError)
    ):
        return json.loads(text)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Yields a list that gets the sentences of all items left out meanwhile, whatever the limits are."""
    sentences: list[str] = []
    token = _collected.set(sentences)
    try:
        yield sentences
    finally:
        _collected.reset(token)


def first_sentences(sentences: Sequence[str]) -> str:
    """The first five sentences, one per line, and the number of the others."""
    more = len(sentences) - SHOWN
    return "\n  ".join([*sentences[:SHOWN], *([f"and {more:,} more."] if more > 0 else [])])


def refusal(sentences: Sequence[str], limit: int, argument: str) -> ValueError:
    """The error for more unusable items than `argument` allows."""
    first, *others = first_sentences(sentences).split("\n", 1)
    more = f" More than `{argument}`={limit}." if limit or others else ""
    return ValueError("\n".join([first + more, *others]))


def none_usable(sentences: Sequence[str], item: str = "sample") -> ValueError:
    """The error for data of which nothing can be used, even if all may be left out."""
    return ValueError(f"None of the {len(sentences):,} {item}s can be used:\n  {first_sentences(sentences)}")


def warn_or_raise(sentences: Sequence[str], limit: int, argument: str) -> None:
    """Warns of the items that are left out; raises ValueError if they are more than limit, the value of `argument`."""
    collected = _collected.get()
    if collected is not None:
        collected += sentences
        return
    if len(sentences) > limit:
        raise refusal(sentences, limit, argument)
    if sentences:
        logger.warning("Left out (%d of at most %d): %s", len(sentences), limit, first_sentences(sentences))
