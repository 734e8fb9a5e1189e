"""Every figure fits the text of a page and has no small letters; its words are the user's."""

import math

import pytest
import timm
import torch
from matplotlib.text import Text

import linvit  # noqa: F401
from evidence.study_page import group_figure
from linvit.analysis import answers
from linvit.analysis import attention_figures as attention
from linvit.analysis.answers import Answers, confused_pairs
from linvit.analysis.figures import SMALL
from linvit.analysis.magnitude import compare_readouts, measure_magnitude
from linvit.analysis.probe import probe
from linvit.analysis.rank import measure_ranks
from linvit.analysis.run_figures import training_curve
from linvit.analysis.scores import measure_scores, score_maps
from linvit.studies.table import Row, estimate, over_figure
from linvit.tasks import Classification

FORMULA = r"$\frac{1}{$ & <b>"
WIDEST = 8.5  # inches: a square confusion matrix of 30 classes is a little wider than a page of text


def attention_figures():
    torch.manual_seed(0)
    network, images = timm.create_model("mavit_nano", pattern="LLSS"), torch.randn(2, 3, 64, 64)
    ranks = measure_ranks(network, [images])
    yield attention.rank_figure(ranks)
    yield attention.spectrum_figure(ranks)
    maps = score_maps(network, images, (0.5, 0.5))
    yield attention.score_map_figure(list(images.sigmoid().movedim(1, -1)), maps, (0.5, 0.5))
    yield attention.score_measure_figure(measure_scores(network, [images]))
    yield attention.readout_figure(compare_readouts(probe(network, images)[0]))
    yield attention.magnitude_figure(measure_magnitude(network, [images], factors=(0.5, 1.0, 2.0)))
    yield attention.comparison_figure({FORMULA: ranks}, [("rank", {"matrix": "mixed"}, "rank")])


def answer_figures():
    for count in (2, 50):
        targets = torch.arange(count).repeat(2)
        given = Answers(torch.arange(2 * count), targets, targets.flip(0), torch.rand(2 * count), [FORMULA] * count)
        yield answers.class_accuracies(given)
        yield answers.confusion_matrix(torch.rand(count, count), [FORMULA] * count)
        yield answers.confused_images(given, confused_pairs(given, 3, 6), lambda index: torch.rand(4, 4))
    yield answers.calibration_curve(given)


def run_figures():
    rows = [{"epoch": 1, "train_loss": 2.0, "lr": 0.1, "top1": 0.5}]
    yield training_curve(rows, Classification.measures)
    over_seeds = {
        "one": (90.0, 91.0, 92.0), FORMULA: (90.0, math.nan, 92.0), "lost": (math.nan,) * 3
    }  # fmt: skip
    table = [
        Row(name, FORMULA, 1, values, estimate([value for value in values if math.isfinite(value)]), 1.0)
        for name, values in over_seeds.items()
    ]
    yield group_figure(table, (FORMULA,), "accuracy, %")
    yield over_figure(table[:2], FORMULA, "accuracy, %")


@pytest.mark.parametrize("figures", [attention_figures, answer_figures, run_figures])
def test_figures_are_readable(figures):
    for figure in figures():
        figure.draw_without_rendering()
        assert figure.get_figwidth() <= WIDEST
        small = {text.get_text() for text in figure.findobj(Text) if text.get_text() and text.get_fontsize() < SMALL}
        assert small == set()
