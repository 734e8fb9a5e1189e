"""The command line: arguments and printing, one file for each command; the work is done by runs, studies and bench.

What a user can get wrong ends in one sentence on stderr and exit code 2; `--debug` shows where it came from.
Heavy imports wait until a command needs them.
"""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from linvit_cli.commands import COMMANDS
from linvit_cli.failures import STOPPED, explain, say
from linvit_cli.overrides import split_overrides


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments, overrides = split_overrides(sys.argv[1:] if argv is None else list(argv))
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "train":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if overrides and not options.takes_overrides:
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.rest, options.overrides = rest, overrides
    try:
        with _messages_on_stderr():
            return options.run(options)
    except KeyboardInterrupt:
        return say("Stopped.", STOPPED)
    except Exception as error:
        if options.debug:
            raise
        return explain(error, options.flags)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="linvit", description="Linear attention for vision: RAVLT, MAViT, CARE.")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument("--version", action="version", version=f"linvit {version('linvit')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, help=module.HELP, description=module.HELP, parents=[common], allow_abbrev=False
        )
        module.add_arguments(command)
        command.set_defaults(
            run=module.run,
            takes_overrides=getattr(module, "TAKES_OVERRIDES", False),
            flags=_flags(command),
        )
    return parser


def _flags(command: argparse.ArgumentParser) -> dict[str, str]:
    """How the arguments of a command, and of its actions, are written."""
    flags = {action.dest: action.option_strings[-1] for action in command._actions if action.option_strings}
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name in action.choices:
                flags |= _flags(action.choices[name])
    return flags


@contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """What the library logs, as plain lines."""
    logger = logging.getLogger("linvit")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
