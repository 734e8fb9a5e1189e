import math
from pathlib import Path

import pytest

from linvit.studies.compare import Row, _folder_name, compare, over_figure, table
from linvit.studies.statistics import estimate


def row(recipe, value, measures, difference=None):
    finite = [measure for measure in measures if math.isfinite(measure)]
    return Row(recipe, value, 1234, tuple(measures), estimate(finite), difference, 5.0)


ROWS = [
    row("softmax", "4", [99.0, 98.0, 97.0]),
    row("mala", "4", [90.0, 91.0, 89.0], estimate([-9.0, -7.0, -8.0])),
    row("softmax", "8", [95.0, 94.0, math.nan]),
    row("mala", "8", [50.0, 52.0, 51.0], estimate([-45.0, -42.0])),
]


def test_the_table_says_mean_interval_and_difference():
    lines = table(ROWS, "data.pairs", "recall_accuracy").splitlines()
    assert lines[0].startswith("| recipe | `data.pairs` | parameters | answers, % | Δ softmax | p |")
    assert lines[2].startswith("| `softmax` | 4 | 1,234 | 98.00 ± 2.48 | – | – |")
    assert "-8.00 [-10.48, -5.52] | 0.005 |" in lines[3]


def test_every_recipe_has_a_line_over_the_setting_and_shares_stay_shares():
    axes = over_figure(ROWS, "data.pairs", "answers, %").axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["softmax", "mala"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8"]
    low, high = axes.get_ylim()
    assert low >= -2
    assert high <= 102


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipes": []}, "0 recipes"),
        ({"seeds": 0}, "0 seeds"),
        ({"over": "data.pairs"}, "--over is 'data.pairs': write key=value"),
        ({"over": "data.pairs=4,,8"}, "expected values that are there once each"),
        ({"over": "data.pairs=4,8,4"}, "expected values that are there once each"),
        ({"over": "seed=1,2"}, "'seed' is each run's own"),
        ({"overrides": ["folder=elsewhere"]}, "'folder' is each run's own"),
        ({"recipes": [Path("a/mala.yaml"), Path("b/mala.yaml")]}, "Two recipes are called mala"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        compare(**{"recipes": [tmp_path / "a.yaml"], "folder": tmp_path / "out", **arguments})


def test_runs_stay_in_their_folder_whatever_the_value():
    values = {"4": "4", "0.5": "0.5", "/data/text": "_data_text", "..": "_", "a/../b": "a_.._b"}
    assert {value: _folder_name(value) for value in values} == values


def test_recipes_of_two_tasks_are_refused(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("model: {name: sequence_nano}\ntask: {name: recall}\ndata: {name: recall}\n")
    second.write_text("model: {name: ravlt_nano}\ndata: {name: digits}\n")
    with pytest.raises(ValueError, match="of the tasks classification, recall"):
        compare([first, second], tmp_path / "out")
