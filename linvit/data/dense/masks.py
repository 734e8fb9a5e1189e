"""Masks in COCO's formats: polygons, and run lengths along the columns, plain or compressed to a string."""

from collections.abc import Sequence
from functools import cache
from operator import ne
from typing import Any

import numpy as np

from linvit.errors import quoted

FARTHEST = 2  # times the longer side of the image; time and memory for a polygon grow with its size
Segmentation = dict[str, Any] | list[list[float]]


def to_mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
    """Draws polygons (their union) or run lengths without a fault: uint8 (height, width), 1 inside."""
    if isinstance(segmentation, list):
        segmentation = _runs().merge(_runs().frPyObjects(segmentation, *size))
    elif isinstance(segmentation["counts"], list):
        segmentation = _runs().frPyObjects(segmentation, *size)
    mask: np.ndarray = _runs().decode(segmentation)
    return mask


def mask_fault(segmentation: Any, size: tuple[int, int]) -> str:
    """Why a segmentation cannot be used, as the end of a sentence; "" if it can be. Polygons are not drawn for this."""
    pixels = f"{size[0]}×{size[1]} px"
    if isinstance(segmentation, dict):
        counts = segmentation.get("counts")
        if not isinstance(segmentation.get("size"), list | tuple) or tuple(segmentation["size"]) != tuple(size):
            size_of_mask = quoted(segmentation.get("size"))
            return f"has a mask of the size {size_of_mask}, but its image has {pixels} (height × width)"
        if isinstance(counts, list):
            are_counts = all(type(count) is int and count >= 0 for count in counts)
            if not are_counts or sum(counts) != size[0] * size[1]:
                return f"has run lengths that do not fill its {pixels}"
        try:
            return "" if to_mask(segmentation, size).any() else "has a mask without a pixel in it"
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
            return f"has run lengths that do not fill its {pixels}"
    if not isinstance(segmentation, list) or not segmentation:
        return "has no mask, expected polygons or run lengths"
    farthest = FARTHEST * max(size)
    for polygon in segmentation:
        has_pairs = isinstance(polygon, list) and len(polygon) >= 6 and len(polygon) % 2 == 0
        if not has_pairs or set(map(type, polygon)) - {int, float} or any(map(ne, polygon, polygon)):  # as NaN is
            return "has a polygon that is not a list of three or more pairs of numbers x, y"
        if not -farthest <= min(polygon) <= max(polygon) <= farthest:
            return f"has a polygon far outside its image of {pixels} (height × width)"
    return "" if any(map(area_of, segmentation)) else "has a polygon without an area"


def to_runs(mask: np.ndarray) -> dict[str, Any]:
    """Compressed run lengths of a mask (height, width), as a string for JSON."""
    encoded = _runs().encode(np.asfortranarray(mask, dtype=np.uint8))
    counts = encoded["counts"]
    return {"size": list(mask.shape), "counts": counts if isinstance(counts, str) else counts.decode()}


def to_counts(mask: np.ndarray) -> dict[str, Any]:
    """Plain run lengths of a mask (height, width), beginning with zeros, as in COCO's crowds."""
    flat = np.asarray(mask, dtype=np.uint8).ravel(order="F")
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    lengths = np.diff(bounds).tolist()
    return {"size": list(mask.shape), "counts": [0, *lengths] if flat[0] else lengths}


def box_around(runs: dict[str, Any]) -> tuple[float, float, float, float]:
    """x, y, width and height of the smallest box around the pixels of compressed run lengths; zeros without pixels."""
    return tuple(_runs().toBbox(runs).tolist())


@cache
def _runs() -> Any:
    """Imported with the first mask, because sources without masks do not need it."""
    from faster_coco_eval import mask

    return mask


def area_of(polygon: Sequence[float]) -> float:
    """The area of a polygon x, y, x, y … in square pixels (the shoelace formula)."""
    across, down = polygon[::2], polygon[1::2]
    doubled = sum(across[i - 1] * down[i] - across[i] * down[i - 1] for i in range(len(across)))
    return abs(doubled) / 2
