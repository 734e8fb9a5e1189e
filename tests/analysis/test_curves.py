import math

import pytest

from linvit.analysis.run_figures import training_curve
from linvit.runs.tasks import RUNS
from linvit.tasks import Classification, Detection


def test_rows_without_a_moving_average_have_curves():
    rows = [{"epoch": 1, "train_loss": 2.0, "top1": 0.5}, {"epoch": 2, "train_loss": 1.0, "top1": 0.75}]
    loss, accuracy = training_curve(rows, Classification.measures).axes
    assert loss.lines[0].get_ydata().tolist() == [2, 1]
    assert accuracy.lines[0].get_ydata().tolist() == [50, 75]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_measure_with_a_panel_has_its_curve(run):
    for name, measure in run.task_class.measures.items():
        if measure.panel not in (None, "loss"):
            rows = [{"epoch": 1, "lr": 0.1, name: 0.5}, {"epoch": 2, "lr": 0.1, name: 0.25}]
            values = training_curve(rows, run.task_class.measures).axes[0].lines[0].get_ydata()
            assert list(values) == [0.5 * measure.factor, 0.25 * measure.factor]


def test_epochs_without_validation_leave_no_gaps():
    rows = [{"epoch": number, "train_loss": 1.0, "lr": 0.1} for number in range(1, 5)]
    rows[1] |= {"box_ap": 0.2, "mask_ap": 0.1}
    rows[3] |= {"box_ap": 0.5, "mask_ap": 0.4}
    scores = training_curve(rows, Detection.measures).axes[1]
    assert [line.get_label() for line in scores.lines] == ["box AP", "mask AP"]
    assert list(scores.lines[0].get_xdata()) == [2, 4]
    assert list(scores.lines[0].get_ydata()) == [20.0, 50.0]


def test_a_panel_without_a_finite_value_is_left_out():
    rows = [{"epoch": 1, "train_loss": 1.0, "lr": 0.1, "box_ap": math.nan, "mask_ap": math.inf}]
    assert [axes.get_ylabel() for axes in training_curve(rows, Detection.measures).axes] == ["loss", "learning rate"]
    assert training_curve([{"epoch": 1, "train_loss": math.nan}], Detection.measures).axes == []
