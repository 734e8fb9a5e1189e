"""Average precision as COCO defines it."""

import contextlib
import io
from collections.abc import Iterable, Sequence
from typing import Any

MEASURES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")


def average_precision(
    ground_truth: dict[str, Any], results: Sequence[dict[str, Any]], image_ids: Iterable[int], kind: str
) -> dict[str, float]:
    """Measures in 0..1, averaged over classes, of detections on some images, by faster-coco-eval.

    ap is the mean over IoU 0.5, 0.55, … 0.95, ap50 and ap75 those at one, ap_small, ap_medium and ap_large those of
    objects of up to 32², 96² and more pixels, left out where there are none.

    Args:
        ground_truth: Content of a COCO file.
        results: Entries of a COCO results file.
        image_ids: The images that were looked at.
        kind: "bbox" or "segm", whichever overlap counts.
    """
    from faster_coco_eval import COCO, COCOeval_faster  # part of the extra `dense`

    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(ground_truth)
        if not results:
            return {"ap": 0.0, "ap50": 0.0, "ap75": 0.0}
        judge = COCOeval_faster(truth, truth.loadRes(list(results)), kind)
        judge.params.imgIds = sorted(image_ids)
        judge.run()
    return {name: float(value) for name, value in zip(MEASURES, judge.stats, strict=False) if value >= 0}
