import sys

import pytest

from linvit.bench import sampling
from linvit.runs.listing_generation import describe_generators


def test_the_figure_and_the_table_hold_what_was_measured(tmp_path, monkeypatch, capsys):
    figure = tmp_path / "sampling.svg"
    monkeypatch.setattr(sys, "argv", ["sampling", str(figure), "--sides", "8", "16", "--rounds", "1"])
    monkeypatch.setattr(sampling.torch, "set_num_threads", lambda number: None)
    sampling.main()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1] for line in printed[2:]] == ["16", "64"]
    assert "images a second, 50 steps" in figure.read_text() or figure.stat().st_size > 5000


def test_a_figure_that_cannot_be_drawn_is_refused_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sampling", "figure.xyz"])
    with pytest.raises(SystemExit):
        sampling.main()
    assert "another ending than .svg or .png" in capsys.readouterr().err


def test_dit_small_has_the_macs_that_its_paper_prints():
    rows = {(row["variant"], row["mechanism"]): row for row in describe_generators()}

    def every(variant, mechanism):
        row = rows[variant, mechanism]
        return (row["macs"] + row["macs_attention"]) / 1e9

    assert every("DiT-S/2", "softmax") == pytest.approx(6.06, abs=0.005)
    tokens, width, head_width, layers = 256, 384, 64, 12
    matrices = 2 * tokens**2 * width * layers / 1e9  # scores, and scores times values
    assert every("DiT-S/2", "softmax") - rows["DiT-S/2", "softmax"]["macs"] / 1e9 == pytest.approx(matrices)
    states = 2 * tokens * width * head_width * layers / 1e9
    assert every("DiT-S/2", "linear") - every("DiT-S/2", "softmax") == pytest.approx(states - matrices, abs=2e-3)
    assert len({rows["DiT-S/2", mechanism]["parameters"] for mechanism in ("softmax", "linear", "mala", "rala")}) == 1
