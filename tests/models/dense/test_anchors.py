"""Anchors, matching and box codes against hand-made cases."""

import pytest
import torch

from linvit.models.dense.anchors import Anchors, BoxDeltas, QualityMatcher


def test_anchors_are_not_rounded_and_keep_their_stride():
    anchors = Anchors((8, 64), (4 * 2 ** (1 / 3),)).per_level([torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 1, 2)])
    side = 32 * 2 ** (1 / 3)
    wide = torch.tensor([-side / 0.5**0.5, -side * 0.5**0.5, side / 0.5**0.5, side * 0.5**0.5]) / 2
    torch.testing.assert_close(anchors[0][0], wide)
    torch.testing.assert_close(anchors[0][3] - anchors[0][0], torch.tensor([8.0, 0, 8, 0]))
    torch.testing.assert_close(anchors[0][9] - anchors[0][0], torch.tensor([0.0, 8, 0, 8]))
    torch.testing.assert_close(anchors[1][3] - anchors[1][0], torch.tensor([64.0, 0, 64, 0]))
    areas = (anchors[0][:, 2] - anchors[0][:, 0]) * (anchors[0][:, 3] - anchors[0][:, 1])
    torch.testing.assert_close(areas, torch.full_like(areas, side**2))


def test_anchors_stay_in_float32_under_half_precision():
    assert Anchors((4,), (8,)).per_level([torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16)])[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("least", "expected"),
    [(None, [0, -2, -1, -1]), (0.0, [0, -2, 1, 2]), (0.3, [0, -2, -1, 2])],
)
def test_objects_claim_their_best_boxes_from_a_least_overlap_on(least, expected):
    overlaps = torch.tensor([[0.8, 0.45, 0.0, 0.1], [0.1, 0.0, 0.2, 0.1], [0.0, 0.1, 0.1, 0.35]])
    assert QualityMatcher(0.5, 0.4, least)(overlaps).tolist() == expected


def test_an_object_that_overlaps_nothing_claims_nothing():
    assert QualityMatcher(0.5, 0.4, 0.0)(torch.zeros(1, 3)).tolist() == [-1, -1, -1]


def test_codes_come_back_and_scales_are_limited_both_ways():
    coder = BoxDeltas((0.1, 0.1, 0.2, 0.2))
    regions = torch.tensor([[10.0, 20, 50, 40], [0, 0, 8, 8]])
    objects = torch.tensor([[12.0, 18, 47, 44], [1, 1, 5, 9]])
    codes = coder.encode_single(objects, regions)
    torch.testing.assert_close(codes[0, 0], torch.tensor((29.5 - 30) / 40 / 0.1))
    torch.testing.assert_close(coder.decode_single(codes, regions), objects)
    tiny = coder.decode_single(torch.tensor([[0.0, 0, -1e3, 1e3]]), torch.tensor([[0.0, 0, 16, 16]]))[0]
    torch.testing.assert_close(tiny[2:] - tiny[:2], torch.tensor([16 * 16 / 1000, 1000.0]))
