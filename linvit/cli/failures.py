"""What went wrong, in one sentence on stderr and an exit code."""

import sys

WRONG_USE, SOME_FAILED, STOPPED = 2, 1, 130
LISTED = 8


def explain(error: Exception) -> int:
    """The exit code, after one sentence on what a user can mend; a bug of ours keeps its traceback."""
    if type(error).__name__ == "RunStoppedError":
        return say(str(error), STOPPED)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("linvit"):
        package = (error.name or "").partition(".")[0]
        return say(
            f"linvit: this command needs {package}: pip install"
            " 'linvit[train,dense,report,language,speech,generation]' brings it.",
            WRONG_USE,
        )
    if type(error) is ImportError and error.name is None:  # a sentence of ours on what is not installed
        return say(f"linvit: {error}", WRONG_USE)
    if type(error).__name__ == "MisconfigurationException":
        return say(f"linvit: Lightning's trainer refuses this: {' '.join(str(error).split())}", WRONG_USE)
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return say(
            f"linvit: A process that reads data died ({str(error).splitlines()[0].rstrip(' .')}), often for want of"
            " memory: lower data.num_workers (eval: --workers); a run goes on with --resume.",
            WRONG_USE,
        )
    if not isinstance(error, (ValueError, OSError, FloatingPointError)):
        raise error
    return say(f"linvit: {error}", WRONG_USE)


def say(sentence: str, code: int) -> int:
    first, *listed = sentence.strip().splitlines()  # a list of what does not fit may follow the sentence
    shown = [first, *listed[:LISTED]]
    if len(listed) > LISTED:
        shown.append(f"  … and {len(listed) - LISTED} more")
    print("\n".join(shown), file=sys.stderr)
    return code
