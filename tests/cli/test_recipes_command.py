import json

import pytest

import linvit
from linvit_cli import main


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def test_all_of_them_fit_eighty_columns(capsys):
    assert main(["recipes"]) == 0
    shown = capsys.readouterr().out
    assert "\ndemo/ravlt_nano_digits\n    RAVLT nano, RALA in all four stages" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_search_shows_the_whole_header(capsys):
    assert main(["recipes", "language", "0.3b_rala"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "language/0.3b_rala"
    assert [line.split(":")[0].strip() for line in lines if ":  " in line] == ["ours", "cost", "command"]
    assert any(line.endswith(" \\") for line in lines)
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("1 recipe. ")


def test_json_is_one_list(capsys):
    assert main(["recipes", "demo", "care", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["command"] == "linvit train demo/care_nano_digits"


def test_what_is_not_there_is_one_sentence(capsys):
    assert main(["recipes", "nothing_of_the_kind"]) == 2
    assert capsys.readouterr().err.startswith("linvit: No recipe contains 'nothing_of_the_kind' in its name or header")


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"linvit {linvit.__version__}\n"
