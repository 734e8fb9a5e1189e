"""`linvit bench` as a user runs it."""

import json

import pytest

from linvit import allocator
from linvit.bench import operators, rows
from linvit_cli import _parser, main

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
    assert "rala plain float32 at 6 tokens gives a wrong result" in shown.err


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
        (["op", "ralla"], "operator is 'ralla', expected one of linear"),
        (["model", "ravlt_tinny"], "network 'ravlt_tinny' is unknown"),
        (["train", "care_nano", "--variants", "onnxruntime"], "has the part 'onnxruntime'"),
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


@pytest.mark.parametrize(
    ("arguments", "head", "count"),
    [
        (["decoding", "mala", "softmax", "--contexts", "16", "32", "--rounds", "1"], "kept MiB", 4),
        (["sampling", "--sides", "8", "16", "--rounds", "1"], "images/s, 50 steps", 4),
        (["precision", "mala", "--tokens", "49"], "ours / float32 math", 6),
    ],
)
def test_every_kind_gives_its_table_and_files(arguments, head, count, tmp_path, capsys):
    assert main(["bench", *arguments, "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(head in line for line in lines)
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == count
    assert (tmp_path / "growth.svg").is_file() == (arguments[0] != "precision")


def test_an_argument_that_is_not_given_keeps_the_default_of_its_kind():
    options = _parser().parse_args(["bench", "memory", "--sizes", "64"])
    given = {name: getattr(options, name) for name in options.settings if name in options}
    assert given == {"sizes": [(64, 64)], "keep_memory": False, "json": False, "output": None, "write": None}
