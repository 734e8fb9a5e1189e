"""Every command explains itself: groups, a default for each option, and examples that can be typed."""

import argparse
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from linvit.bench.networks import PARTS, PLAIN
from linvit_cli import _parser, main, parse
from linvit_cli.commands import COMMANDS


def leaves(parser, path=()):
    """(words, parser) of each command and action."""
    choices = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not choices:
        yield path, parser
    for name, inner in (choices or [{}])[0].items():
        yield from leaves(inner, (*path, name))


LEAVES = dict(leaves(_parser()))


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def shown_help(parser, action):
    return parser.formatter_class("linvit")._get_help_string(action)


@pytest.mark.parametrize("path", LEAVES, ids="-".join)
def test_every_option_has_a_default_or_is_required(path):
    for action in LEAVES[path]._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            assert "default: " in (text := shown_help(LEAVES[path], action)) or "(required)" in text, action


@pytest.mark.parametrize("path", LEAVES, ids="-".join)
def test_every_command_has_examples_that_parse(path):
    lines = LEAVES[path].epilog.splitlines()
    assert lines[0] in ("example:", "examples:")
    for line in lines[1:]:
        program, *arguments = shlex.split(line)
        assert program == "linvit"
        assert tuple(arguments[: len(path)]) == path
        parse(arguments)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), *LEAVES], ids="-".join)
def test_help_fits_eighty_columns_but_for_examples(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith(" ".join(["usage: linvit", *command]))
    about, _, examples = shown.rpartition("example")
    assert max(map(len, about.splitlines())) <= 80
    assert "  linvit " in examples


def test_every_command_is_listed_once(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert [name for name in listed if name in COMMANDS] == list(COMMANDS)


def written_default(path, dest):
    action = next(action for action in LEAVES[path]._actions if action.dest == dest)
    return shown_help(LEAVES[path], action).rpartition("default: ")[2].rstrip(")").partition(",")[0]


def in_words(value):
    if isinstance(value, tuple):
        return " ".join(in_words(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_defaults_of_runs_are_those_of_the_code():
    from linvit.runs.tasks import RUNS

    called = {
        "predict": [RUNS["classification"].predict, RUNS["detection"].predict],
        "generate": [RUNS["language"].generate, RUNS["diffusion"].generate],
        "analyze": [RUNS["classification"].analyze],
    }
    for command, functions in called.items():
        dests = {action.dest for action in LEAVES[command,]._actions}
        for function in functions:
            for name, parameter in inspect.signature(function).parameters.items():
                if name in dests and parameter.default and not isinstance(parameter.default, bool | type):
                    assert written_default((command,), name) == in_words(parameter.default), (command, name)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["predikt"], ["eval", "--bem", "3"], ["models"]]
)
def test_nothing_heavy_is_imported_to_help_or_list(arguments):
    """Importing torch takes seconds."""
    assert loaded(*arguments, "--json" if arguments == ["models"] else "--debug") & HEAVY == set()


@pytest.mark.parametrize("arguments", [["models", "--task", "detection"], ["models", "--task", "speach"], ["recipes"]])
def test_lists_and_their_typos_import_no_torch(arguments):
    assert loaded(*arguments) & (HEAVY - {"rich"}) == set()


HEAVY = {"torch", "timm", "rich", "numpy"}


def loaded(*arguments):
    code = "import sys, linvit_cli; linvit_cli.main(sys.argv[1:])"
    ended = subprocess.run([sys.executable, "-X", "importtime", "-c", code, *arguments], capture_output=True, text=True)
    assert ended.stdout or "linvit: " in ended.stderr
    lines = ended.stderr.splitlines()
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time")}
    assert "linvit_cli" in names
    return names


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["predikt"], "Did you mean 'predict'? `linvit --help` shows"),
        ([], "required: COMMAND"),
        (["eval", "run", "--bem", "3"], "linvit eval has no option --bem. Did you mean '--beam'?"),
        (["predict", "run", "x.png", "--topk=3", "--topk", "4"], "--topk: it is given twice, expected once"),
        (["eval", ""], "an argument is empty: give it a value"),
        (["predict", "run", "x.png", "--topk", "many"], "--topk: 'many' is not a whole number"),
        (["bench", "op", "--device", "gpu"], "--device: 'gpu' is not one of cpu, cuda"),
        (["eval", "run", "another"], "linvit eval does not accept the argument 'another'"),
        (["compare", "x.yaml"], "required: --folder"),
        (["convert", "a", "b", "--model", "\x1b[31mred", "\x1b[0m"], r"the argument '\x1b[0m'"),
        (["predict", "run", "--topk", "9" * 5000], "…"),
    ],
)
def test_what_does_not_fit_is_one_sentence_with_the_nearest(arguments, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("linvit: ")
    assert sentence in said.err
    assert len(said.err.splitlines()) == 1
    assert len(said.err) < 600
    assert "\x1b" not in said.err


@pytest.mark.parametrize("given", ["my.yml", "my", "ym.yaml"])
def test_a_recipe_of_another_ending_is_offered(given, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").touch()
    assert main(["train", given]) == 2
    assert "Did you mean 'my.yaml'?" in capsys.readouterr().err


def test_the_help_names_every_part_of_a_variant(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "model", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert {PLAIN, *PARTS} <= words


def test_options_may_stand_before_and_after():
    for arguments in (
        ["--topk", "3", "run", "x.png"],
        ["run", "--topk", "3", "x.png"],
        ["run", "x.png", "--topk", "3"],
    ):
        options = parse(["predict", *arguments, "data.size=64"])
        assert (options.paths, options.topk, options.overrides) == (["run", "x.png"], 3, ["data.size=64"])


def test_after_two_dashes_everything_is_a_path():
    options = parse(["predict", "run", "--", "-odd.png", "data.x=y"])
    assert (options.paths, options.overrides) == (["run", "-odd.png", "data.x=y"], [])
