import pytest

from linvit.analysis.curves import training_curve
from linvit.analysis.figures import svg
from linvit.tasks import Classification, Diffusion, Language, Segmentation, Speech


def test_training_curve_takes_rows_without_a_moving_average():
    rows = [{"epoch": 1, "train_loss": 2.0, "top1": 0.5}, {"epoch": 2, "train_loss": 1.0, "top1": 0.75}]
    figure = training_curve(rows, Classification.measures)
    loss, accuracy = figure.axes
    assert loss.lines[0].get_ydata().tolist() == [2, 1]
    assert accuracy.lines[0].get_ydata().tolist() == [50, 75]
    assert "<svg" in svg(figure)


@pytest.mark.parametrize(
    ("task", "column", "points"),
    [
        (Classification, "top1", [50, 25]),
        (Segmentation, "miou", [50, 25]),
        (Language, "next_accuracy", [50, 25]),
        (Language, "bits_per_byte", [0.5, 0.25]),
        (Speech, "wer", [50, 25]),
        (Diffusion, "ema_generated_accuracy", [50, 25]),
    ],
)
def test_the_measures_of_every_task_have_their_curve(task, column, points):
    rows = [{"epoch": 1, "lr": 0.1, column: 0.5}, {"epoch": 2, "lr": 0.1, column: 0.25}]
    first, rate = training_curve(rows, task.measures).axes
    assert first.lines[0].get_ydata().tolist() == points
    assert rate.get_ylabel() == "learning rate"
