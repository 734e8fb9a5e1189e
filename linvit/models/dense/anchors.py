"""Anchors, their assignment to objects and the coding of boxes, as in the detectors of the papers.

torchvision's classes, changed where mmdetection 2.11, in which the published detectors were trained, differs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList


class Anchors(AnchorGenerator):
    """Anchors of three aspect ratios on levels of fixed strides, in float32 or wider, not rounded to whole pixels.

    Args:
        strides: pixels between the anchors of each level.
        scales: side of the square anchors over the stride.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float]) -> None:
        self.strides = tuple(strides)
        super().__init__(tuple(tuple(scale * stride for scale in scales) for stride in strides), (0.5, 1.0, 2.0))

    def generate_anchors(
        self,
        scales: Sequence[float],
        aspect_ratios: Sequence[float],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Boxes (ratios · scales, 4) around the origin; the scales of one ratio are adjacent."""
        tall = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        sides = torch.tensor(scales, dtype=dtype, device=device)[None]
        widths, heights = (sides / tall).flatten(), (sides * tall).flatten()
        return torch.stack([-widths, -heights, widths, heights], dim=1) / 2

    def per_level(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """The anchors of each level, (height · width · anchors, 4)."""
        dtype = torch.promote_types(maps[0].dtype, torch.float32)
        self.set_cell_anchors(dtype, maps[0].device)
        sizes = [list(level.shape[-2:]) for level in maps]
        return self.grid_anchors(sizes, [[stride, stride] for stride in self.strides])

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """The anchors of all levels, once per image."""
        return [torch.cat(self.per_level(feature_maps))] * len(image_list.image_sizes)


class QualityMatcher(Matcher):
    """Assigns to every box the object that it overlaps most, and to every object the boxes that overlap it most.

    Args:
        high, low: IoU from which a box is an object, and below which it is background.
        least: minimum IoU for the second assignment; None turns it off. If two objects get the same box, the later one
            keeps it.
    """

    def __init__(self, high: float, low: float, least: float | None) -> None:
        super().__init__(high, low, allow_low_quality_matches=least is not None)
        self.least = least

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        """Assign to every object the boxes that overlap it most, in place."""
        assert self.least is not None
        best = match_quality_matrix.amax(1)
        for index in torch.where((best >= self.least) & (best > 0))[0].tolist():
            matches[match_quality_matrix[index] == best[index]] = index


class BoxDeltas(BoxCoder):
    """Codes boxes as shifts and log scales over standard deviations; scales are clipped to 16/1000 … 1000/16."""

    def __init__(self, deviations: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)) -> None:
        super().__init__(tuple(1 / deviation for deviation in deviations))

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Codes (n, 4·k) on boxes (n, 4) to boxes (n, 4·k)."""
        limits = [float("-inf"), float("-inf"), *(-self.bbox_xform_clip * weight for weight in self.weights[2:])]
        floor = rel_codes.new_tensor(limits).repeat(rel_codes.shape[1] // 4)
        return super().decode_single(torch.maximum(rel_codes, floor), boxes)
