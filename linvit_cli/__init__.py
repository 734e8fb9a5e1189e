"""The command line: arguments and printing, one file for each command; the work is done by runs, studies and bench.

A user's mistake ends in one sentence on stderr and exit code 2; `--debug` shows the traceback.
Heavy imports wait until a command needs them.
"""

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import distributions

from linvit_cli.commands import COMMANDS, overview
from linvit_cli.failures import STOPPED, WRONG_USE, end_of_output, explain, explain_output, say
from linvit_cli.parser import Parser, add_help, examples
from linvit_cli.run_arguments import split_overrides
from linvit_cli.streams import open_streams, output_error, printable, stopped_by_sigterm

FIRST_STEPS = ("linvit demo", "linvit train demo/ravlt_nano_digits", "linvit eval --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; arguments that do not fit, and --help, raise SystemExit."""
    if not open_streams():
        return say("linvit: Standard output is closed, so that results would be lost: open it.", WRONG_USE)
    if "matplotlib" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"  # files only; a notebook's backend may not be installed here
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as ended:
        sys.exit(end_of_output(ended.code if isinstance(ended.code, int) else WRONG_USE))
    try:
        with _messages_on_stderr(), stopped_by_sigterm():
            code: int = options.run(options)
    except KeyboardInterrupt:
        code = say("Stopped.", STOPPED)
    except Exception as error:
        lost = output_error()
        if lost is not None:
            return explain_output(lost)
        if options.debug:
            raise
        return explain(error, options)
    return end_of_output(code)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command; `rest` has the arguments that `train` passes on, `overrides` each `data.key=value`.

    Raises SystemExit, after a sentence on stderr, for arguments that do not fit.
    """
    parser = _parser()
    takes_overrides = bool(arguments) and hasattr(COMMANDS.get(arguments[0]), "TAKES_OVERRIDES")
    arguments, overrides = split_overrides(arguments) if takes_overrides else (arguments, [])
    options: argparse.Namespace
    options, rest = parser.parse_known_args(arguments)
    command: Parser = options.parser
    if "" in arguments and getattr(options, "prompt", None) != "":
        command.error("an argument is empty: give it a value, or leave it out")
    if rest and options.command != "train":
        command.refuse(rest)
    options.rest, options.overrides, options.takes_overrides = rest, overrides, takes_overrides
    return options


def _parser() -> Parser:
    parser = Parser(
        prog="linvit",
        usage="linvit COMMAND [options]; `linvit COMMAND --help` explains a command",
        description=f"Linear attention for vision: RAVLT, MAViT, CARE.\n\n{overview()}",
        epilog=examples(*FIRST_STEPS),
    )
    version = next((each.version for each in distributions(name="linvit")), "(not installed)")
    parser.add_argument("--version", action="version", version=f"linvit {version}", help="show the version")
    add_help(parser)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS, prog="linvit"
    )
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, description=module.HELP, epilog=examples(*module.EXAMPLES))
        module.add_arguments(command)
        command.set_defaults(run=module.run)
        for leaf in _leaves(command):
            leaf.finish()
            leaf.set_defaults(parser=leaf, flags=_flags(leaf))
        if not command.get_default("parser"):
            add_help(command)
    return parser


def _leaves(command: Parser) -> list[Parser]:
    """The parsers of a command's actions; the command itself if it has none."""
    parsers = [action.choices for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    return [leaf for choices in parsers for leaf in choices.values()] or [command]


def _flags(command: Parser) -> dict[str, str]:
    """The flag of each option of a command, such as --topk, by its name in Python."""
    return {action.dest: action.option_strings[-1] for action in command._actions if action.option_strings}


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Shows the library's log messages as plain lines."""
    logger = logging.getLogger("linvit")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(message)s"))
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
