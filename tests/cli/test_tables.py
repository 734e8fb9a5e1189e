"""Tables on terminals of any width."""

import re
import sys

import pytest

from linvit.bundled import list_networks
from linvit_cli import main
from linvit_cli.models import readable
from linvit_cli.streams import show_pieces, show_rows


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("task", ["classification", "detection", "speech"])
def test_no_digit_is_cut_on_a_narrow_terminal(columns, task, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["models", "--task", task]) == 0
    shown = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out)  # bold headings
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines() if line[:1] in "│┃┏└├┡") <= columns
    rows = readable(list_networks(task))
    number = next(heading for heading in rows[0] if heading.startswith(("parameters", "with CTC")))
    table, _, hidden = shown.partition("Not shown, because the terminal is too narrow")
    assert all(row[number] in table for row in rows) == (number not in hidden)
    if columns in (40, 200):
        assert bool(hidden) == (columns == 40)


def test_a_pipe_gets_every_column(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    show_rows([{"name": "a" * 50, **{f"column {number}": "1,234,567" for number in range(20)}}])
    shown = capsys.readouterr().out
    assert "column 19" in shown
    assert "a" * 50 in shown


def test_rows_without_a_value_have_a_dash(capsys):
    show_rows([{"name": "x", "ms": "1"}, {"name": "y"}])
    assert "–" in capsys.readouterr().out


def test_pieces_are_shown_one_after_the_other(capsys):
    show_pieces(["one ", "two\x1b", "\n"])
    assert capsys.readouterr().out == "one two\\x1b\n\n"
