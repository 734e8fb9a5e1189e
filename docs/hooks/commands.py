"""The page of all commands, from their parsers."""

import argparse
import os
from collections.abc import Iterator

from linvit_cli import _parser
from linvit_cli.commands import GROUPS
from linvit_cli.parser import HelpFormatter, Parser

COLUMNS = 100  # of usage and help texts
INTRODUCTION = """# Commands

Every command with all its options, as `linvit COMMAND --help` prints them. `key.key=value` changes a setting of a
recipe after `train`, `data.key=value` one of the data after `eval`, `predict` and `analyze`. A mistake ends in
[one sentence](errors.md) and exit code 2; `--debug`, which every command has, shows the traceback.
"""


def page() -> str:
    """The page as Markdown."""
    os.environ["COLUMNS"] = str(COLUMNS)
    commands = _choices(_parser())
    lines = [INTRODUCTION]
    for group, names in GROUPS.items():
        lines.append(f"## {group[0].upper()}{group[1:]}\n")
        for name in names:
            lines += _command(name, commands[name], level=3)
    return "\n".join(lines)


def _choices(parser: argparse.ArgumentParser) -> dict[str, Parser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((action.choices for action in actions), {})


def _command(name: str, parser: Parser, level: int) -> Iterator[str]:
    yield f"{'#' * level} linvit {name} {{: #{name.replace(' ', '-')} }}\n"
    yield f"{(parser.description or '').partition(chr(10))[0]}\n"
    inner = _choices(parser)
    if not inner:
        yield f"```\n{parser.format_usage().removeprefix('usage: ').strip()}\n```\n"
        for group in parser._action_groups:
            yield from _options(group, parser)
        yield f"{_examples(parser)}\n"
    for word, action in inner.items():
        yield from _command(f"{name} {word}", action, level + 1)


def _options(group: argparse._ArgumentGroup, parser: Parser) -> Iterator[str]:
    formatter = HelpFormatter(parser.prog)
    actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
    if actions and group.title != "other":
        yield f"| {group.title} | |\n|---|---|"
        yield from (f"| `{_shown(formatter, action)}` | {_help(formatter, action)} |" for action in actions)
        yield ""


def _shown(formatter: HelpFormatter, action: argparse.Action) -> str:
    """Such as `--topk N` or `RECIPE`."""
    shown = formatter._format_action_invocation(action)
    return shown.replace("|", "\\|")


def _help(formatter: HelpFormatter, action: argparse.Action) -> str:
    text = formatter._expand_help(action) if action.help else ""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _examples(parser: Parser) -> str:
    commands = [line.strip() for line in (parser.epilog or "").splitlines()[1:]]
    return "```sh\n" + "\n".join(commands) + "\n```" if commands else ""
