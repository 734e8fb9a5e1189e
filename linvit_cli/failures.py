"""What went wrong, in one sentence on stderr and an exit code."""

from __future__ import annotations

import argparse
import re
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from linvit.errors import spelled
from linvit_cli.streams import BROKEN_PIPE, complain, output_error

WRONG_USE, SOME_FAILED, STOPPED, BUG = 2, 1, 130, 70
LISTED, MOST_FILES = 8, 20
MISTAKES = (ValueError, OSError, FloatingPointError, OverflowError)
NO_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|Storage size calculation overflowed")
LONG_WORD = re.compile(r"(\S{150})\S{100,}(\S{50})")  # a name or value that would fill the screen
DISTRIBUTIONS = {"sklearn": "scikit-learn"}
"""The name in the package index of packages that are imported under another name."""


def explain(error: Exception, options: argparse.Namespace) -> int:
    """Prints one sentence for a user's mistake, a traceback for a bug of ours, and returns the exit code."""
    sentence = spelled(str(error), _spellings(options).get) if "`" in str(error) else str(error)
    if type(error).__name__ == "RunStoppedError":
        return say(sentence, STOPPED)
    reason = _mistake(error, sentence)
    if reason is None:
        say("linvit: This is a bug in linvit. Please report it to its authors with your command and these lines:", BUG)
        traceback.print_exception(error)
        return BUG
    return say(f"linvit: {reason}", WRONG_USE)


def explain_output(error: OSError) -> int:
    """The exit code if standard output cannot be written; a closed pipe, as of `head`, is no mistake."""
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    return say(
        f"linvit: Standard output cannot be written ({error.strerror}), so that results are lost: make room or send it"
        " elsewhere.",
        WRONG_USE,
    )


def _mistake(error: Exception, sentence: str) -> str | None:
    """The user's mistake in a sentence; None for a bug of ours."""
    if isinstance(error, ImportError) and not error.name:  # a sentence, ours or Lightning's, on what is not installed
        return " ".join(sentence.split()) or None
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("linvit"):
        return _missing(error.name or "")
    if isinstance(error, RuntimeError) and "operator torchvision::" in str(error):
        versions = " and ".join(f"{name} {version(name)}" for name in ("torch", "torchvision"))
        return (
            f"{versions} do not fit together ({_first_line(sentence)}): install both from the same index, for example"
            " `pip install --force-reinstall torch torchvision --index-url https://download.pytorch.org/whl/cpu`."
        )
    if isinstance(error, OSError | RuntimeError) and "Too many open files" in str(error):
        return (
            "The system lets a process open too few files: raise the limit (`ulimit -n 4096`), or set data.num_workers"
            " lower; a training continues with --resume."
        )
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return (
            f"A process that reads data was killed ({sentence.splitlines()[0].rstrip(' .')}), often because"
            " memory ran out: set data.num_workers lower; a training continues with --resume."
        )
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        return f"Memory ran out ({_first_line(sentence) or 'MemoryError'}): make sizes, batches or the network smaller."
    if isinstance(error, RecursionError):
        return "A file or setting is nested too deeply to be read: make it flatter."
    if any(error_class.__name__ == "YAMLError" for error_class in type(error).__mro__):
        return f"A file is not valid YAML ({' '.join(sentence.split())}): correct it."
    if isinstance(error, OSError) and error.filename and error.strerror:  # the system's own, not a sentence of ours
        return f"{error.filename} cannot be used ({error.strerror}): check the path and its permissions."
    if isinstance(error, UnicodeError):
        return f"Text cannot be read or written in this encoding ({_first_line(sentence)}): use UTF-8."
    return sentence if isinstance(error, MISTAKES) else None


def _missing(module: str) -> str:
    """A sentence with the smallest extra of linvit that installs a missing module."""
    package = module.partition(".")[0]
    wanted = DISTRIBUTIONS.get(package, package).replace("_", "-").lower()
    extras: dict[str, list[str]] = {}
    for requirement in _requirements():
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        if name and extra and extra[1] != "dev":
            extras.setdefault(extra[1], []).append(name[0].replace("_", "-").lower())
    fitting = sorted((len(names), extra) for extra, names in extras.items() if wanted in names)
    if not fitting:
        return f"This command needs the package {package}: install it with `pip install {wanted}`."
    smallest = fitting[0][1]
    return (
        f"This command needs the package {package}: install it with `pip install 'linvit[{smallest}]'`, or in a clone"
        f" or an unpacked archive with `pip install '.[{smallest}]'`."
    )


def _requirements() -> Sequence[str]:
    try:
        return requires("linvit") or ()
    except PackageNotFoundError:
        return ()


def _spellings(options: argparse.Namespace) -> dict[str, str]:
    """How the command's user writes Python's arguments: as its options and override keys."""
    spellings: dict[str, str] = {}
    if options.takes_overrides:
        spellings |= {name: f"data.{name}" for name in _data_keys(options.overrides)} | {"data": "data"}
    if options.command == "train":
        spellings |= {"resume": "--resume", "folder": "folder", "seed": "seed", "data": "data"}
    return spellings | dict(options.flags)


def _data_keys(overrides: Sequence[str]) -> set[str]:
    """The settings of the source that the overrides name, by default of all sources."""
    from linvit.ranges import declared
    from linvit.runs.tasks import SOURCES

    values: Mapping[str, str] = dict(override.split("=", 1) for override in overrides if "=" in override)
    name = values.get("data.name", values.get("data", ""))
    sources = [SOURCES[name]] if name in SOURCES else SOURCES.values()
    return {key for source in sources for key in declared(source)}


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0].rstrip(" .")


def say(sentence: str, code: int, most: int = LISTED) -> int:
    """Prints a sentence and at most so many lines below it on stderr; returns the exit code."""
    first, *listed = sentence.strip().splitlines() or [""]  # the sentence may be followed by a list
    lines = [first, *listed[:most]]
    if len(listed) > most:
        lines.append(f"  … and {len(listed) - most:,} more")
    complain("\n".join(LONG_WORD.sub(r"\1 … \2", line) for line in lines))
    return code


def say_unreadable(sentences: Sequence[str]) -> int:
    """Prints a line for each file that was left out, at most MOST_FILES, and returns the exit code."""
    for sentence in sentences[:MOST_FILES]:
        say(f"linvit: {sentence}", SOME_FAILED)
    if len(sentences) > MOST_FILES:
        say(f"linvit: {len(sentences) - MOST_FILES:,} more files cannot be used.", SOME_FAILED)
    return SOME_FAILED if sentences else 0


def end_of_output(code: int) -> int:
    """The exit code; that of a failure if the output could not be written."""
    error = output_error()
    return code if error is None else explain_output(error)
