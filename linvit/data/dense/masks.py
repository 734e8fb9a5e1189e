"""Masks as COCO writes them: polygons, and run lengths down the columns, plain or compressed to a string."""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

Segmentation = dict[str, Any] | list[list[float]]


def to_mask(segmentation: Segmentation, size: tuple[int, int]) -> np.ndarray:
    """uint8 (height, width), 1 inside, of polygons (their union) or run lengths.

    Raises ValueError where that is not possible; the message completes a sentence that names the annotation.
    """
    if isinstance(segmentation, dict):
        return _of_runs(segmentation, size)
    _check_polygons(segmentation)
    return _runs().decode(_runs().merge(_runs().frPyObjects(segmentation, *size)))


def check_mask(segmentation: Any, size: tuple[int, int]) -> None:
    """Raises ValueError as to_mask does, and for run lengths of an empty mask; polygons are not drawn for it."""
    if not isinstance(segmentation, dict):
        _check_polygons(segmentation)
    elif not _of_runs(segmentation, size).any():
        raise ValueError("has a mask without a pixel in it")


def to_runs(mask: np.ndarray) -> dict[str, Any]:
    """Compressed run lengths of a mask (height, width), with a string that JSON can hold."""
    encoded = _runs().encode(np.asfortranarray(mask, dtype=np.uint8))
    counts = encoded["counts"]
    return {"size": list(mask.shape), "counts": counts if isinstance(counts, str) else counts.decode()}


def to_counts(mask: np.ndarray) -> dict[str, Any]:
    """Plain run lengths of a mask (height, width), the first of them zeros, as COCO writes its crowds."""
    flat = np.asarray(mask, dtype=np.uint8).ravel(order="F")
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
    lengths = np.diff(bounds).tolist()
    return {"size": list(mask.shape), "counts": [0, *lengths] if flat[0] else lengths}


def box_around(mask: np.ndarray) -> tuple[float, float, float, float]:
    """x, y, width and height of the smallest box around a mask's pixels; zeros where there are none."""
    return tuple(_runs().toBbox(to_runs(mask)).tolist())


@cache
def _runs() -> Any:
    """Imported when the first mask is read: sources without masks do without it."""
    from faster_coco_eval import mask

    return mask


def _of_runs(segmentation: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    written = segmentation.get("size")
    if not isinstance(written, Sequence) or tuple(written) != tuple(size):
        shown = "×".join(map(str, written)) if isinstance(written, Sequence) else written
        raise ValueError(f"has a mask of {shown} px, but its image has {size[0]}×{size[1]} px (height × width)")
    counts = segmentation.get("counts")
    try:
        if isinstance(counts, list):
            if any(not isinstance(count, int) or count < 0 for count in counts) or sum(counts) != size[0] * size[1]:
                raise ValueError
            segmentation = _runs().frPyObjects(segmentation, *size)
        return _runs().decode(segmentation)
    except (ValueError, TypeError, KeyError, RuntimeError):
        raise ValueError(f"has run lengths that do not fill its {size[0]}×{size[1]} px") from None


def _check_polygons(segmentation: Any) -> None:
    if not isinstance(segmentation, list) or not segmentation:
        raise ValueError("has no mask, expected polygons or run lengths")
    for polygon in segmentation:
        if not _is_polygon(polygon):
            raise ValueError("has a polygon that is no list of at least three pairs x, y of numbers")


def _is_polygon(polygon: Any) -> bool:
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        return False
    numbers = set(map(type, polygon)) <= {int, float}
    return numbers and math.isfinite(sum(polygon))
