import numpy as np
import pytest
from pycocotools import mask as judge

from linvit.data.dense.annotations import box_around, mask_fault, to_counts, to_mask, to_runs

SIZES = [(7, 7), (14, 9), (1, 17), (17, 1), (1, 1)]


def drawn(size, share):
    return (np.random.default_rng(0).random(size) < share).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_run_lengths_round_trip_and_are_those_of_pycocotools(size, share):
    mask = drawn(size, share)
    assert (to_mask(to_runs(mask), size) == mask).all()
    assert (to_mask(to_counts(mask), size) == mask).all()
    assert to_runs(mask)["counts"] == judge.encode(np.asfortranarray(mask))["counts"].decode()
    assert judge.frPyObjects(to_counts(mask), *size)["counts"].decode() == to_runs(mask)["counts"]


@pytest.mark.parametrize("size", SIZES)
def test_box_is_that_of_pycocotools(size):
    mask = drawn(size, 0.1)
    mask[0, -1] = 1
    assert list(box_around(to_runs(mask))) == judge.toBbox(judge.encode(np.asfortranarray(mask))).tolist()
    assert box_around(to_runs(np.zeros(size))) == (0, 0, 0, 0)


def test_polygons_are_united():
    squares = [[1, 1, 4, 1, 4, 4, 1, 4], [6.0, 2.0, 9.0, 2.0, 9.0, 5.0, 6.0, 5.0]]
    expected = np.zeros((8, 12), np.uint8)
    expected[1:4, 1:4] = expected[2:5, 6:9] = 1
    assert (to_mask(squares, (8, 12)) == expected).all()


@pytest.mark.parametrize(
    ("segmentation", "says"),
    [
        (None, "has no mask"),
        ([[1, 2, 3, 4]], "three or more pairs"),
        ([[1, 2, 3, 4, 5, float("nan")]], "three or more pairs"),
        ({"size": [9, 14], "counts": [126]}, "mask of the size [9, 14], but its image has 14×9 px"),
        ({"size": [14, 9], "counts": [100, 25]}, "do not fill its 14×9 px"),
        ({"size": [14, 9], "counts": "zz!"}, "do not fill its 14×9 px"),
        ({"size": [14, 9], "counts": [True, 125]}, "do not fill its 14×9 px"),
        ({"size": [14, 9], "counts": [126]}, "without a pixel"),
        ([[1, 1, 2, 2, 3, 3]], "without an area"),
        ([[0, 0, 1e9, 0, 1e9, 1e9]], "far outside its image of 14×9 px"),
    ],
)
def test_what_is_no_mask_is_named(segmentation, says):
    assert says in mask_fault(segmentation, (14, 9))
