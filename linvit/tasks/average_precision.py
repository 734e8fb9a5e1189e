"""Average precision as COCO defines it."""

import contextlib
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

HEADINGS = {
    "ap": "AP",
    "ap50": "AP50",
    "ap75": "AP75",
    "ap_small": "AP, small",
    "ap_medium": "AP, medium",
    "ap_large": "AP, large",
}


def average_precision(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> dict[str, float]:
    """Average precision of detections on some images, in 0..1, averaged over classes, by faster-coco-eval.

    ap is the mean over IoU 0.5, 0.55, … 0.95, ap50 and ap75 those at one, ap_small, ap_medium and ap_large those of
    objects of up to 32², 96² and more pixels, left out if there are none. Without any object there is no precision.

    Args:
        ground_truth: Content of a COCO file.
        results: Entries of a COCO results file.
        image_ids: The evaluated images.
        kind: "bbox" or "segm", the overlap that counts.
    """
    image_ids = set(image_ids)
    if not any(entry["image_id"] in image_ids and not entry.get("iscrowd") for entry in ground_truth["annotations"]):
        return {}
    evaluation = _evaluation(ground_truth, results, image_ids, kind)
    if evaluation is None:
        return {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}
    return {name: float(value) for name, value in zip(HEADINGS, evaluation.stats, strict=False) if value >= 0}


def average_precision_by_class(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> dict[int, tuple[float, float, int]]:
    """(ap, ap50, number of objects) by category id, for categories with objects; crowds are not counted.

    Arguments as in average_precision.
    """
    image_ids = set(image_ids)
    counts = Counter(
        entry["category_id"]
        for entry in ground_truth["annotations"]
        if entry["image_id"] in image_ids and not entry.get("iscrowd")
    )
    evaluation = _evaluation(ground_truth, results, image_ids, kind)
    if evaluation is None:
        return {category: (0.0, 0.0, count) for category, count in sorted(counts.items())}
    precision = evaluation.eval["precision"][..., 0, -1]  # (IoUs, recalls, categories): objects of all areas
    by_category = dict(zip(evaluation.params.catIds, precision.transpose(2, 0, 1), strict=True))
    return {
        category: (float(by_category[category].mean()), float(by_category[category][0].mean()), count)
        for category, count in sorted(counts.items())
    }


def _evaluation(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> Any:
    """The finished evaluation of faster-coco-eval; None if there are no detections."""
    from faster_coco_eval import COCO, COCOeval_faster  # part of the extra `dense`

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(ground_truth)
        if not results:
            return None
        evaluation = COCOeval_faster(truth, truth.loadRes(list(results)), kind)
        evaluation.params.imgIds = sorted(image_ids)
        evaluation.run()
    return evaluation
