"""How arguments are read: help in groups with defaults and examples, and one sentence for what does not fit."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from linvit.ranges import nearest
from linvit_cli.streams import complain

WRONG_USE = 2
WIDEST, LONGEST_MESSAGE = 100, 400
NARROWEST = 60


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that argparse knows; for other options the help text contains the default."""

    def __init__(self, prog: str) -> None:
        columns = shutil.get_terminal_size().columns - 2
        super().__init__(prog, max_help_position=26, width=max(NARROWEST, min(WIDEST, columns)))

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not action.option_strings or (action.nargs == 0 and action.const is not True) or "default" in text:
            return text
        if action.required:
            return f"{text} (required)"
        if action.const is True and action.nargs == 0:
            return f"{text} (default: off)"
        default = action.default
        if default is None or default == argparse.SUPPRESS or default == ():
            return text
        return f"{text} (default: {default})"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE and isinstance(action.metavar, str):
            return f"{action.metavar} ..."
        return super()._format_args(action, default_metavar)


class Once(argparse._StoreAction):
    """An option that refuses to be given twice: argparse would silently keep the last value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if option_string and getattr(namespace, self.dest, self.default) is not self.default:
            raise argparse.ArgumentError(self, "it is given twice, expected once: leave one out")
        if option_string and values == "" and self.const is None and self.dest != "prompt":
            raise argparse.ArgumentError(self, "its value is empty: give one, or leave the option out")
        super().__call__(parser, namespace, values, option_string)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one sentence, with the nearest known word."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, "allow_abbrev": False, "add_help": False, **options})
        self._positionals.title = "arguments"
        self.register("action", None, Once)
        self.register("action", "store", Once)
        self._intermixing = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Allows options between paths."""
        if self._intermixing or self._subparsers is not None:
            return super().parse_known_args(args, namespace)
        self._intermixing = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixing = False

    def finish(self) -> None:
        """Adds the options that every command has, after its own."""
        groups = {group.title: group for group in self._action_groups}
        other = groups.get("other") or self.add_argument_group("other")
        other.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
        add_help(other)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        text = text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} …"
        end = "" if text.endswith((".", "?")) else "."
        complain(f"linvit: {text}{end} `{self.prog} --help` shows what there is.")
        sys.exit(WRONG_USE)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(names)}.{nearest(value, names)}")

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Exits with a sentence on the first unknown argument."""
        first = rest[0]
        if "=" in first and not first.startswith("-"):
            self.error(f"{self.prog} does not accept {first.partition('=')[0]}=value: leave it out")
        if not first.startswith("-"):
            self.error(f"{self.prog} does not accept the argument {first!r}: leave it out")
        options = [name for action in self._actions for name in action.option_strings]
        self.error(f"{self.prog} has no option {first.partition('=')[0]}.{nearest(first.partition('=')[0], options)}")


def add_help(group: argparse._ActionsContainer) -> None:
    group.add_argument("-h", "--help", action="help", help="show this help and exit")


def listing(about: Mapping[str, str]) -> str:
    """Names with their descriptions, one per line."""
    widest = max(map(len, about))
    return "\n".join(f"  {name:{widest}}  {text}" for name, text in about.items())


def examples(*commands: str) -> str:
    """The end of a help page."""
    return "\n".join(["examples:" if len(commands) > 1 else "example:", *(f"  {command}" for command in commands)])


def whole(text: str) -> int:
    """The integer value of an option; its range is checked later, in linvit."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    """The numeric value of an option."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def image_size(text: str) -> tuple[int, int]:
    """224 or 1024x2048 (height × width) as (height, width)."""
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isascii() and side.isdigit() and len(side) < 10 for side in sides):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a side such as 224, or 1024x2048")
    return int(sides[0]), int(sides[-1])
