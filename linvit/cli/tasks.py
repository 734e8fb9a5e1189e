"""The tasks as recipes name them; here detectors and segmentors meet the tasks that train them."""

from typing import Any

from linvit.models.frameworks import build_dense
from linvit.tasks import Classification, Detection, Segmentation, Task


class BuiltDetection(Detection):
    """Detection with a network by its arguments.

    Args:
        model: framework, backbone, heads and further arguments of the backbone, see build_dense.
        num_classes: Number of classes of the data.
        kwargs: Those of Task.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(build_dense(**model, num_classes=num_classes), **kwargs)


class BuiltSegmentation(Segmentation):
    """Segmentation with a network by its arguments.

    Args:
        model: framework, backbone, heads and further arguments of the backbone, see build_dense.
        num_classes: Number of classes of the data.
        kwargs: Those of Segmentation.
    """

    def __init__(self, model: dict[str, Any], num_classes: int, **kwargs: Any) -> None:
        super().__init__(build_dense(**model, num_classes=num_classes), num_classes, **kwargs)


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "detection": BuiltDetection,
    "segmentation": BuiltSegmentation,
}
