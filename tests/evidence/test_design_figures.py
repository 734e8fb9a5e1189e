"""The figures of designs, from made-up ledgers and rows."""

from dataclasses import replace

import numpy as np
import pytest
from design_ledger import full, write_ledger
from scipy import stats

from evidence import design_figures, design_page
from evidence.designs import REFEREE
from evidence.gpu import rows
from evidence.rows import EVIDENCE


def lines_of(axes):
    """The ends of each interval by its place, counted from the top."""
    return {line.get_ydata()[0]: tuple(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 1.6}


def test_a_figure_shows_each_epoch_and_the_gains_beside_the_margin(tmp_path):
    referee = replace(REFEREE, folder=tmp_path)
    assert design_figures.of_design(referee) is None
    write_ledger(referee.ledger, full({"mala_blocks": 0.82}, but=("mhla seed 115",)) | {"nala seed 100": None})
    *epochs, gains = design_figures.of_design(referee).axes
    assert [axes.get_title() for axes in epochs] == ["epoch 3", "epoch 10", "last epoch"]
    assert [label.get_text() for label in epochs[0].get_yticklabels()] == list(REFEREE.variants)
    for axes, when in zip(epochs, ("3", "10", "last"), strict=True):
        accuracies = design_page.numbers(referee, when)
        intervals = lines_of(axes)
        assert [*intervals] == [*range(len(REFEREE.variants))]
        for place, (low, high) in intervals.items():
            values = np.array([value for value in accuracies[REFEREE.variants[place]] if value == value])
            assert len(values) == 3 if REFEREE.variants[place] == "nala" else len(values) >= 4
            half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
            assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half))
    table = design_page.claims_table(referee).splitlines()[2:]
    for (low, high), line in zip(lines_of(gains).values(), table, strict=True):
        assert f"[{low:+.2f}, {high:+.2f}]" in line
    dots = [line.get_markerfacecolor() for line in gains.lines if line.get_marker() == "o"]
    hollow = [claim.pair for claim, colour in zip(referee.claims, dots, strict=True) if colour == "white"]
    assert hollow == [claim.pair for claim in referee.claims if "mhla" in claim.pair]
    assert gains.get_yticklabels()[0].get_text() == "mala_blocks\n− mala"
    write_ledger(referee.ledger, {"mala seed 100": 0.7})
    assert [len(lines_of(axes)) for axes in design_figures.of_design(referee).axes] == [1, 1, 1, 0]


def test_a_figure_of_published_sizes_has_the_card_with_most_networks(tmp_path, monkeypatch):
    monkeypatch.setattr(design_figures, "ROWS", tmp_path)
    assert design_figures.of_published() is None
    curve = [{"seconds": 6.0, "train_loss": 2.0} | ({"top1": 0.1 * n} if n % 5 == 0 else {}) for n in range(1, 11)]
    for card, name in (("H200", "mavit_tiny"), ("H200", "care_s1"), ("A100", "mavit_tiny")):
        key = {"job": "published", "case": name, "card": card, "torch": "2", "triton": "3", "code": ""}
        rows.append(tmp_path, key | {"cells": [{"network": name}], "curve": curve})
    over_epochs, over_time = design_figures.of_published().axes
    for axes, places in ((over_epochs, [5, 10]), (over_time, [0.5, 1.0])):
        assert [line.get_label() for line in axes.lines] == ["mavit_tiny", "care_s1"]
        for line in axes.lines:
            assert [*line.get_xdata()] == pytest.approx(places)
            assert [*line.get_ydata()] == pytest.approx([50, 100])


def test_a_page_has_a_figure_as_soon_as_there_are_rows():
    for name, (page, _, draw) in design_figures.FIGURES.items():
        drawn = draw() is not None
        assert (EVIDENCE / f"{name}.svg").exists() == drawn, "run `make summaries`"
        assert (f"]({name}.svg)" in (EVIDENCE / f"{page}.md").read_text()) == drawn
        assert (design_figures.image(name) == design_figures.LATER) != drawn
