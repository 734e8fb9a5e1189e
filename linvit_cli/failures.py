"""What went wrong, in one sentence on stderr and an exit code."""

import sys
from collections.abc import Mapping, Sequence

WRONG_USE, SOME_FAILED, STOPPED = 2, 1, 130
LISTED = 8
EXTRAS = "'linvit[train,dense,report,language,speech,generation]'"


def explain(error: Exception, flags: Mapping[str, str]) -> int:
    """The exit code, after one sentence on what a user can mend; a bug of ours keeps its traceback.

    flags: argument → how it is written on the command line.
    """
    if type(error).__name__ == "RunStoppedError":
        return say(_spelled(str(error), flags), STOPPED)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("linvit"):
        package = (error.name or "").partition(".")[0]
        return say(f"linvit: this command needs {package}: pip install {EXTRAS} brings it.", WRONG_USE)
    if type(error) is ImportError and error.name is None:  # a sentence of ours on what is not installed
        return say(f"linvit: {error}", WRONG_USE)
    if type(error).__name__ == "MisconfigurationException":
        return say(f"linvit: Lightning's trainer refuses this: {' '.join(str(error).split())}", WRONG_USE)
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return say(
            f"linvit: A process that reads data was killed ({str(error).splitlines()[0].rstrip(' .')}), often because"
            " memory ran out: set data.num_workers lower; a training continues with --resume.",
            WRONG_USE,
        )
    if not isinstance(error, (ValueError, OSError, FloatingPointError)):
        raise error
    return say(f"linvit: {_spelled(str(error), flags)}", WRONG_USE)


def _spelled(sentence: str, flags: Mapping[str, str]) -> str:
    """The sentence with flags, and keys of the data, in place of Python's arguments."""
    from linvit.runs.settings import parameters, respelled
    from linvit.runs.tasks import SOURCES

    keys = {name for source in SOURCES.values() for name in parameters(source)}
    fixed = {"resume": "--resume", "folder": "folder=…", "seed": "seed", "data": "data"}
    return respelled(sentence, {name: f"data.{name}" for name in keys} | fixed | dict(flags))


def say(sentence: str, code: int) -> int:
    """Prints a sentence and at most LISTED lines below it on stderr; returns the exit code."""
    first, *listed = sentence.strip().splitlines()  # a list of what does not fit may follow the sentence
    lines = [first, *listed[:LISTED]]
    if len(listed) > LISTED:
        lines.append(f"  … and {len(listed) - LISTED} more")
    print("\n".join(lines), file=sys.stderr)
    return code


def say_unreadable(sentences: Sequence[str]) -> int:
    """Names the files that were left out; the exit code says whether there were any."""
    for sentence in sentences:
        say(f"linvit: {sentence}", SOME_FAILED)
    return SOME_FAILED if sentences else 0
