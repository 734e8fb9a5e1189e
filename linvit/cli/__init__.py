"""The command line: `linvit train | eval | predict | generate | analyze | convert | models | demo | …`, see COMMANDS.

What a user can get wrong ends in one sentence on stderr and exit code 2; `--debug` shows where it came from.
Heavy imports wait until a command needs them.
"""

import argparse
import sys
from collections.abc import Sequence

from linvit.cli.commands import COMMANDS
from linvit.cli.failures import STOPPED, explain, say


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    try:
        return options.run(options)
    except KeyboardInterrupt:
        return say("Stopped.", STOPPED)
    except Exception as error:
        if options.debug:
            raise
        return explain(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="linvit", description="Linear attention for vision: RAVLT, MAViT, CARE.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (add_arguments, run, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, parents=[common], allow_abbrev=False)
        add_arguments(command)
        command.set_defaults(run=run)
    return parser
