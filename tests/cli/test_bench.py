"""`linvit bench` as a user runs it."""

import json

import pytest

from linvit import allocator
from linvit.bench import inference, operators, rows
from linvit_cli import bench, main

OP = ["bench", "op", "rala", "--tokens", "6", "12", "--heads", "1", "--width", "4", "--rounds", "1"]


def test_op_gives_table_json_and_files(tmp_path, capsys):
    assert main([*OP, "--json", "--output", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| rala") for line in lines) == 4
    report = json.loads(lines[-1])
    assert len(report["rows"]) == 6
    assert report["rows"][0]["ratio"] == 1
    assert report["machine"]["threads"] == 1
    assert json.loads((tmp_path / "new/bench.json").read_text())["rows"] == report["rows"]
    assert (tmp_path / "new/growth.svg").read_text().startswith("<?xml")


def test_model_tells_pattern_size_and_peers(tmp_path, capsys):
    command = ["bench", "model", "care_nano", "--variants", "plain", "--peers", "resnet10t", "--rounds", "1"]
    assert main([*command, "--sizes", "32", "32x64", "--batch", "2", "--peer-variants", "plain"]) == 0
    out = capsys.readouterr().out
    assert "32 × 64" in out
    assert "care_nano plain float32, batch 2 grows with pixels^" in out


def test_a_wrong_variant_shows_no_speed_and_fails(monkeypatch, capsys):
    monkeypatch.setitem(operators.REFERENCES, "rala", lambda query, key, value, tables=None: value)
    assert main(OP) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "rala plain float32 at 6 tokens computes a wrong result" in shown.err


def test_an_interrupted_run_shows_what_was_measured(monkeypatch, capsys):
    whole = rows.interleave
    turns = iter([whole, None])

    def interrupted(*arguments):
        turn = next(turns)
        if turn is None:
            raise KeyboardInterrupt
        turn(*arguments)

    monkeypatch.setattr(rows, "interleave", interrupted)
    assert main([*OP, "--json"]) == 130
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["tokens"] for row in measured if row["median_ms"]] == [6, 6, 6]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["op", "ralla"], "Did you mean 'rala'?"),
        (["model", "ravlt_tinny"], "did you mean 'ravlt_tiny'?"),
        (["op", "--rounds", "0"], "--rounds is 0, expected a whole number of 1 or more"),
        (["op", "--tokens", "1000000000"], "needs at least "),
        (["model", "--variants", "fused+bf61"], "Did you mean 'bf16'?"),
        (["train", "--batch", "1"], "--batch is 1, expected a whole number of 2 or more"),
        (["model", "--batch", "0"], "--batch is [0], expected a list of whole numbers of 1 or more"),
        (["op", "--output", "/dev/null"], "The folder /dev/null cannot be written"),
    ],
)
def test_unknown_names_end_in_one_sentence(arguments, sentence, capsys):
    assert main(["bench", *arguments]) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_size_has_two_sides_at_most(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "model", "--sizes", "1x2x3"])
    assert "is not a size" in capsys.readouterr().err


@pytest.mark.parametrize("has_glibc", [True, False])
def test_memory_is_kept_where_the_system_can(has_glibc, monkeypatch, capsys):
    monkeypatch.setattr(allocator, "keep_memory", lambda: has_glibc)
    assert main([*OP, "--keep-memory"]) == (0 if has_glibc else 2)
    shown = capsys.readouterr()
    assert ("freed memory kept" if has_glibc else "--keep-memory needs glibc") in shown.err
    assert bool(shown.out) == has_glibc


def test_a_gpu_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "op", "--device", "cuda"]) == 2
    assert "--device is 'cuda', but torch sees no GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_a_peer_that_fails_is_left_out_with_a_note(monkeypatch, capsys):
    whole = inference.variant_call

    def wrong(network, x, case):
        if case.name != "resnet10t":
            return whole(network, x, case)
        if case.variant == "fused":
            raise AssertionError("no such size")
        return lambda: (0 * x,)

    monkeypatch.setattr(inference, "variant_call", wrong)
    command = ["bench", "model", "care_nano", "--variants", "plain", "--peers", "resnet10t", "--sizes", "32"]
    assert main([*command, "--rounds", "1", "--json"]) == 0
    shown = capsys.readouterr().out
    assert "resnet10t fused float32: no such size" in shown
    assert "resnet10t plain float32: resnet10t plain at 32 × 32, batch 1 computes a wrong result" in shown
    ours, *others = json.loads(shown.splitlines()[-1])["rows"]
    assert ours["median_ms"] > 0
    assert [row["median_ms"] for row in others] == [None, None]


def test_a_network_of_ours_that_fails_is_a_bug(monkeypatch, capsys):
    def broken(*_):
        raise AssertionError("ours")

    monkeypatch.setattr(inference, "variant_call", broken)
    assert main(["bench", "model", "care_nano", "--peers", "--sizes", "32", "--rounds", "1"]) == 70
    first, *traceback = capsys.readouterr().err.split("\nlinvit: ", 1)[1].splitlines()
    assert first.startswith("This is a bug in linvit. Please report it")
    assert traceback[-1] == "AssertionError: ours"


def test_where_stderr_is_no_terminal_a_step_is_a_line_every_ten_seconds(monkeypatch, capsys):
    seconds = iter([0, 1, 5, 10.9, 11, 11, 12, 30, 30, 31, 45, 45])
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(seconds))
    shown = bench.Shown()
    shown.group("exactness", 80)  # 1 s
    for step in ("first", "second", "third", "fourth"):  # 5, 10.9, 11 and 12 s
        shown.say(f"checking the {step}")
    shown.advance()  # 30 s
    shown.group("784 tokens", 9)  # 31 s
    shown.advance()  # 45 s
    shown.clear()
    assert capsys.readouterr().err.splitlines() == [
        "1 s  exactness",
        "11 s  exactness: 0 of 80, checking the third",
        "30 s  exactness: 1 of 80, checking the fourth",
        "31 s  784 tokens",
        "45 s  784 tokens: 1 of 9",
    ]
