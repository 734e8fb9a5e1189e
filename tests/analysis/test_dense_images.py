import pytest
import torch

from linvit.analysis import dense_images
from linvit.analysis.answers import CONFUSED, confusion_matrix
from linvit.analysis.dense_images import class_colors, draw_map, draw_objects, shares, side_by_side

GREY = torch.full((3, 40, 50), 100, dtype=torch.uint8)


def test_colors_differ_and_stay():
    assert len(set(class_colors(150))) == 150
    assert class_colors(3) == class_colors(150)[:3]


def test_small_images_are_enlarged_and_large_ones_keep_their_size():
    assert draw_objects(GREY, torch.zeros(0, 4), [], [], 2).shape == (3, 520, 650)
    large = torch.zeros(3, 700, 20, dtype=torch.uint8)
    assert torch.equal(draw_objects(large, torch.zeros(0, 4), [], [], 2, []), large)


def test_the_first_mask_is_on_top_in_its_color():
    masks = torch.zeros(2, 700, 700, dtype=torch.bool)
    masks[0, 200:400, 200:400] = True
    masks[1, 300:600, 300:600] = True
    image = torch.zeros(3, 700, 700, dtype=torch.uint8)
    boxes = torch.tensor([[200.0, 200, 400, 400], [300, 300, 600, 600]])
    drawn = draw_objects(image, boxes, [1, 0], ["one", "two"], 2, masks)
    first, second = (dense_images.SHADE * torch.tensor(color) for color in (class_colors(2)[1], class_colors(2)[0]))
    assert (drawn[:, 350, 350] - first).abs().max() <= 1
    assert (drawn[:, 500, 500] - second).abs().max() <= 1
    assert drawn[:, 650, 650].tolist() == [0, 0, 0]


def test_words_stay_inside_and_apart():
    boxes = torch.tensor([[0.0, 0, 1, 1], [49, 0, 50, 1], [49, 39, 50, 40], [0, 39, 1, 40], [0, 0, 1, 1]])
    labels, words = [0, 1, 2, 3, 4], ["a rather long name: 99 %"] * 5
    alone, together = (
        [
            int((drawn == torch.tensor(color)[:, None, None]).all(0).sum())
            for drawn, color in zip(images, class_colors(5), strict=True)
        ]
        for images in (
            [draw_objects(GREY, torch.tensor([[20.0, 20, 21, 21]]), [label], words[:1], 5) for label in labels],
            [draw_objects(GREY, boxes, labels, words, 5)] * 5,
        )
    )
    assert min(alone) > 1000, "a label and a tiny box"
    assert all(there >= 0.8 * expected for there, expected in zip(together, alone, strict=True))


def test_a_map_has_its_colors_and_a_legend():
    labels = torch.zeros(40, 50, dtype=torch.uint8)
    labels[:, 25:] = 2
    labels[0] = 255
    drawn = draw_map(GREY, labels, ["sky", "sea", "sand"])
    assert drawn.shape[1] == 520
    assert drawn.shape[2] > 650
    assert drawn[:, 300, -1].tolist() == [255, 255, 255]
    expected = 100 + dense_images.SHADE * (torch.tensor(class_colors(3)[2]) - 100)
    assert (drawn[:, 260, 500] - expected).abs().max() <= 1
    assert shares(labels, 3) == [(0, 39 * 25 / 2000), (2, 39 * 25 / 2000)]


@pytest.mark.parametrize("size", [(3, 700), (100, 700), (700, 100)])
def test_a_legend_of_many_classes_and_any_shape(size):
    labels = (torch.arange(size[0] * size[1]) % 150).reshape(size)
    drawn = draw_map(torch.zeros(3, *size, dtype=torch.uint8), labels, [f"class {number}" for number in range(150)])
    letters = dense_images.LETTERS[0]
    assert drawn.shape[1] == max(size[0], (dense_images.ROWS + 1) * (3 * letters // 2))
    legend = drawn[..., size[1] :]
    assert legend.shape[2] > 100
    assert (legend[:, -letters // 2 :] == 255).all(), "nothing is cut below"
    assert (legend[..., -letters // 2 :] == 255).all(), "nor at the side"
    fills = [torch.tensor(color)[:, None, None] for color in class_colors(dense_images.ROWS - 1)]
    assert all((legend == fill).all(0).any() for fill in fills)


def test_images_of_two_heights_stand_side_by_side():
    both = side_by_side(torch.zeros(3, 10, 20, dtype=torch.uint8), torch.zeros(3, 30, 20, dtype=torch.uint8))
    assert both.shape == (3, 30, 50)
    assert both[:, 20, 5].tolist() == [255, 255, 255]


def test_confusions_of_many_classes_show_the_worst():
    confusion = torch.eye(50, dtype=torch.long)
    confusion[7, 8] = 3
    figure = confusion_matrix(confusion, [f"class {number}" for number in range(50)])
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(names) == CONFUSED
    assert {"class 7", "class 8"} <= set(names)
