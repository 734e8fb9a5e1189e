"""Masks in COCO's formats: polygons, and run lengths along the columns, plain or compressed to a string."""

from collections.abc import Sequence
from functools import cache
from operator import ne
from typing import Any

import numpy as np

FARTHEST = 2  # times the longer side of the image; time and memory for a polygon grow with its size
Segmentation = dict[str, Any] | list[list[float]]


def to_mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
    """Draws polygons (their union) or run lengths: uint8 (height, width), 1 inside.

    Raises ValueError for a malformed segmentation; its text completes a sentence that names the annotation.
    """
    if isinstance(segmentation, dict):
        return _of_runs(segmentation, size)
    _check_polygons(segmentation, size)
    mask: np.ndarray = _runs().decode(_runs().merge(_runs().frPyObjects(segmentation, *size)))
    return mask


def check_mask(segmentation: Any, size: tuple[int, int]) -> None:
    """Raises ValueError as to_mask does, and for run lengths of an empty mask; polygons are checked without drawing."""
    if not isinstance(segmentation, dict):
        _check_polygons(segmentation, size)
    elif not _of_runs(segmentation, size).any():
        raise ValueError("has a mask without a pixel in it")


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


def _of_runs(segmentation: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    written = segmentation.get("size")
    if not isinstance(written, Sequence) or tuple(written) != tuple(size):
        shown = "×".join(map(str, written)) if isinstance(written, Sequence) else str(written)
        raise ValueError(f"has a mask of {shown:.40} px, but its image has {size[0]}×{size[1]} px (height × width)")
    counts = segmentation.get("counts")
    try:
        if isinstance(counts, list):
            if any(type(count) is not int or count < 0 for count in counts) or sum(counts) != size[0] * size[1]:
                raise ValueError
            segmentation = _runs().frPyObjects(segmentation, *size)
        mask: np.ndarray = _runs().decode(segmentation)
        return mask
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError):
        raise ValueError(f"has run lengths that do not fill its {size[0]}×{size[1]} px") from None


def _check_polygons(segmentation: Any, size: tuple[int, int]) -> None:
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("has no mask, expected polygons or run lengths")
    farthest = FARTHEST * max(size)
    for polygon in segmentation:
        if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2 or not _are_numbers(polygon):
            raise ValueError("has a polygon that is not a list of three or more pairs of numbers x, y")
        if not -farthest <= min(polygon) <= max(polygon) <= farthest:
            raise ValueError(f"has a polygon far outside its image of {size[0]}×{size[1]} px (height × width)")
    if not any(map(area_of, segmentation)):
        raise ValueError("has a polygon without an area")


def area_of(polygon: Sequence[float]) -> float:
    """The area of a polygon x, y, x, y … in square pixels (the shoelace formula)."""
    across, down = polygon[::2], polygon[1::2]
    doubled = sum(across[i - 1] * down[i] - across[i] * down[i - 1] for i in range(len(across)))
    return abs(doubled) / 2


def _are_numbers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int, float} and not any(map(ne, values, values))  # NaN differs from itself
