"""Standard output that is closed, full or a broken pipe; names that would steer the terminal."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linvit_cli.streams import printable, show_rows

MODELS = [sys.executable, "-m", "linvit_cli", "models"]
FULL = Path("/dev/full")
needs_full_disk = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def shell(line, **environment):
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(["sh", "-c", line], capture_output=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("command", "target", "unbuffered"),
    [
        ("models", ">&-", ""),
        pytest.param("models", "> /dev/full", "1", marks=needs_full_disk),
        pytest.param("models --json", "> /dev/full", "", marks=needs_full_disk),
        pytest.param("recipes", "> /dev/full", "", marks=needs_full_disk),
        pytest.param("eval --help", "> /dev/full", "1", marks=needs_full_disk),
        pytest.param("--version", "> /dev/full", "", marks=needs_full_disk),
    ],
)
def test_output_that_is_lost_fails_in_one_sentence(command, target, unbuffered):
    ended = shell(f"$PYTHON -m linvit_cli {command} {target}", PYTHONUNBUFFERED=unbuffered)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith(b"linvit: Standard output ")


@pytest.mark.parametrize("ended", ["<&- 2>&-", pytest.param("2> /dev/full", marks=needs_full_disk)])
def test_other_streams_may_be_closed(ended):
    assert b"ravlt_tiny" in shell(f"$PYTHON -m linvit_cli models {ended}").stdout
    assert shell(f"$PYTHON -m linvit_cli modells {ended}").returncode == 2


def test_a_reader_that_has_enough_ends_the_command_quietly():
    ended = shell("{ $PYTHON -m linvit_cli recipes; echo status $? >&2; } | head -n 1")
    assert len(ended.stdout.splitlines()) == 1
    assert ended.stderr in (b"status 141\n", b"status 0\n")  # 0: all was written before the reader left


@pytest.mark.parametrize("encoding", ["ascii", "latin-1:strict"])
def test_every_encoding_shows_something(encoding):
    for command in ("models --family care", "recipes demo", "eval --help"):
        ended = shell(f"$PYTHON -m linvit_cli {command}", PYTHONIOENCODING=encoding, LC_ALL="C")
        assert b"Error" not in ended.stderr
        assert ended.returncode in (0, 2)


def test_an_inherited_backend_of_a_notebook_is_no_obstacle():
    code = "from linvit_cli import main; main(['models', '--json']); import matplotlib; print(matplotlib.get_backend())"
    environment = {**os.environ, "MPLBACKEND": "module://nowhere.inline"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.stdout.splitlines()[-1].lower() == "agg"


def test_a_polite_kill_stops_as_ctrl_c_does():
    code = (
        "import time; from linvit_cli import main, models\n"
        "def wait(options): print('waiting', flush=True); time.sleep(60)\n"
        "models.run = wait; raise SystemExit(main(['models']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == b"Stopped.\n"
    assert process.returncode == 130


@settings(derandomize=True, deadline=None, database=None, max_examples=25)
@given(st.lists(st.text(max_size=20), min_size=3, max_size=3))
def test_any_text_is_shown_as_it_is(texts):
    names = [*texts, "scan[final].png", "a[/b].png", "[link=x]", "\x1b[31mred\x07"]
    shown = []
    with contextlib.redirect_stdout(Lines(shown)):
        show_rows([{"name": name, "number": "1"} for name in names], title="[bold]x[/]", caption="a[/b]")
    text = "".join(shown)
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    for name in ("scan[final].png", "a[/b].png", "[link=x]", r"\x1b[31mred\x07", "[bold]x[/]"):
        assert name in text


class Lines:
    """A stream without a terminal."""

    encoding = "utf-8"

    def __init__(self, shown):
        self.shown = shown

    def write(self, text):
        self.shown.append(text)

    def flush(self):
        pass

    def isatty(self):
        return False


@settings(derandomize=True, deadline=None, database=None, max_examples=100)
@given(st.text())
def test_no_control_character_is_left(text):
    allowed = {"\t", "\n"}
    assert all(
        character.isprintable() or character in allowed or ord(character) > 0x9F for character in printable(text)
    )
    assert printable(printable(text)) == printable(text)
