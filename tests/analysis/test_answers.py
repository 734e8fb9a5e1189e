import pytest
import torch
from torchmetrics.functional.classification import multiclass_calibration_error

from linvit.analysis import answers as answer_figures
from linvit.analysis.answers import Answers, calibration, confused_pairs, expected_calibration_error, per_class
from linvit.data.images import Preprocessing


def answers_from(pairs, confidences=None, classes=4):
    targets, predictions = torch.tensor(pairs).T
    confidences = torch.full((len(pairs),), 0.5) if confidences is None else torch.tensor(confidences)
    names = [f"class {number}" for number in range(classes)]
    return Answers(torch.arange(len(pairs)) + 100, targets, predictions, confidences, names)


def many(classes):
    targets = torch.arange(classes).repeat_interleave(3)
    wrong = torch.rand(len(targets)) < 0.4
    predictions = torch.where(wrong, (targets + 1) % classes, targets)
    names = [f"class {number} of a name that does not fit into any figure" for number in range(classes)]
    return Answers(torch.arange(len(targets)), targets, predictions, torch.rand(len(targets)), names)


def test_accuracy_of_each_class():
    accuracy, counts = per_class(answers_from([(0, 0), (0, 1), (1, 1), (3, 0)]))
    assert counts.tolist() == [2, 1, 0, 1]
    assert accuracy[[0, 1, 3]].tolist() == [0.5, 1, 0]
    assert accuracy[2].isnan()


def test_confused_pairs_come_by_frequency_with_their_most_confident_images():
    answers = answers_from([(0, 1), (1, 1), (0, 1), (2, 3), (0, 0), (0, 1)], confidences=[0.2, 0.9, 0.6, 0.4, 0.9, 0.3])
    first, second = confused_pairs(answers, most=5, examples=2)
    assert (first.true, first.answered, first.count, first.share, first.indices) == (0, 1, 3, 0.75, [102, 105])
    assert (second.true, second.answered, second.count, second.share, second.indices) == (2, 3, 1, 1, [103])
    assert len(confused_pairs(answers, most=1, examples=2)) == 1


def test_calibration_error_is_that_of_torchmetrics():
    probabilities = (3 * torch.randn(200, 5)).softmax(-1)
    targets = torch.randint(5, (200,))
    confidences, predictions = probabilities.max(-1)
    answers = Answers(torch.arange(200), targets, predictions, confidences, list("abcde"))
    expected = multiclass_calibration_error(probabilities, targets, 5, n_bins=15, norm="l1").item()
    assert expected_calibration_error(answers) == pytest.approx(expected, rel=1e-5)  # float32 there
    counts, confidence, accuracy = calibration(answers)
    assert counts.sum() == 200
    assert ((counts * accuracy).nan_to_num().sum() / 200).item() == pytest.approx(answers.right.double().mean().item())
    assert ((counts * confidence).nan_to_num().sum() / 200).item() == pytest.approx(confidences.mean().item())


def test_surely_right_is_perfectly_calibrated_and_surely_wrong_is_not():
    assert expected_calibration_error(answers_from([(0, 0), (1, 1)], [1.0, 1.0])) == 0
    assert expected_calibration_error(answers_from([(0, 1), (1, 0)], [1.0, 1.0])) == 1


@pytest.mark.parametrize(("classes", "panels", "bars"), [(2, 1, 2), (40, 1, 40), (41, 3, 20), (1000, 3, 20)])
def test_classes_stay_readable_however_many_there_are(classes, panels, bars):
    figure = answer_figures.class_accuracies(many(classes))
    assert len(figure.axes) == panels
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == bars
    assert max(map(len, labels)) <= answer_figures.LONGEST


def test_worst_and_best_classes_stand_at_the_top():
    answers = many(100)
    worst, best, _ = answer_figures.class_accuracies(answers).axes
    accuracy = per_class(answers)[0].sort().values
    for axes, expected in ((worst, accuracy[0]), (best, accuracy[-1])):
        assert axes.patches[0].get_width() == pytest.approx(100 * expected.item())
        assert axes.yaxis.get_inverted()


@pytest.mark.parametrize("channels", [1, 3])
def test_confused_images_are_shown_as_they_were_before_normalization(channels):
    answers = answers_from([(0, 1), (2, 3), (0, 1)])
    preprocessing = Preprocessing((32, 32), (0.5,) * channels, (0.25,) * channels)
    figure = answer_figures.confused_images(
        answers,
        confused_pairs(answers, 5, 3),
        lambda index: preprocessing.displayed(torch.full((channels, 4, 4), (index - 100) / 2)),
    )
    shown = [axes.get_images()[0].get_array() for axes in figure.axes if axes.get_images()]
    assert [float(image.flat[0]) for image in shown] == [0.5, 0.75, 0.625]
    assert "true: class 0, 2 images\npredicted: class 1" in [axes.get_title("left") for axes in figure.axes]


def test_calibration_curve_says_its_error():
    assert (
        "expected calibration error 50.00 %"
        in answer_figures.calibration_curve(answers_from([(0, 0), (1, 1)], [0.5, 0.5])).axes[0].get_title()
    )
