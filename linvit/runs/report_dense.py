"""`linvit eval --report` of detectors and segmentors: scores of each class, confusions, pictures beside the truth."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torchmetrics.functional.classification import multiclass_confusion_matrix
from torchvision.transforms.v2 import functional as F

from linvit.analysis import judged_figures as draw
from linvit.analysis.dense_images import draw_map, draw_objects, side_by_side
from linvit.analysis.report import paragraph, photo, picture, table, write_page
from linvit.data import DensePreprocessing
from linvit.data.dense.source import DenseSource
from linvit.runs.evaluate import HEADINGS, cell
from linvit.runs.predict_dense import THRESHOLD, label_map
from linvit.runs.report import curve
from linvit.runs.restore import Restored, source_for
from linvit.tasks import Detection
from linvit.tasks.average_precision import average_precision_by_class
from linvit.tasks.segmentation import IGNORED, overlaps_by_class

SHOWN, PAIRS = 8, 20
UNBROKEN = "\N{NO-BREAK SPACE}"

Section = tuple[str, Sequence[str]]


def write_report(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    path: Path,
    data: str | None = None,
    num_workers: int | None = None,
) -> None:
    """Writes the page of a detector or segmentor; arguments as in judge.write_report, and raises as source_for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = restored.judged.to(device).eval()
    source: Any = source_for(restored, data, num_workers)
    judge = _judge_objects if isinstance(restored.task, Detection) else _judge_maps
    start = time.perf_counter()
    judged = judge(network, source, device)
    seconds = time.perf_counter() - start
    sections = [
        ("What was measured", _summary(restored, measured, device, seconds)),
        *curve(restored),
        *judged,
        ("Pictures", [_about_pictures(restored), *_pictures(restored, network, source, device)]),
    ]
    write_page(path, f"linvit: {restored.name}", sections)


def _summary(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    device: torch.device,
    seconds: float,
) -> list[str]:
    words = {"raw": "raw", "ema": "moving average"}
    rows = [
        {"weights": words[name]}
        | {HEADINGS.get(key, key): cell(key, value).replace(" ", UNBROKEN) for key, value in row.items()}
        for name, row in measured.items()
    ]
    about = restored.preprocessing
    assert isinstance(about, DensePreprocessing)
    count = measured["raw"]["images"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, threads: {torch.get_num_threads()}"
    classes = f"{len(restored.class_names)} classes"
    scaled = f"images scaled to fit {about.short_side} px on their short side and {about.long_side} px on the long one"
    took = f"Reading, network and scores took {seconds / count:.2f} s an image ({where})."
    return [table(rows), paragraph(f"{restored.told(classes, scaled)} {took}")]


@torch.inference_mode()
def _judge_objects(network: Any, source: Any, device: torch.device) -> list[Section]:
    """Average precision of each class, of boxes and of masks."""
    rows: list[dict[str, Any]] = []
    image_ids: list[int] = []
    for images, targets in source.val_dataloader():
        rows += source.results(images, targets, network([image.to(device) for image in images]))
        image_ids += [target["image_id"] for target in targets]
    truth = source.ground_truth()
    sections = []
    for part, overlap in {"boxes": "bbox", "masks": "segm"}.items():
        if overlap == "segm" and not network.has_masks:
            continue
        scores = average_precision_by_class(truth, rows, image_ids, overlap)
        sections.append((f"Average precision of {part} of each class", _average_precisions(scores, source)))
    return sections


def _average_precisions(scores: Mapping[int, tuple[float, float, int]], source: Any) -> list[str]:
    ids = source.annotations("val").category_ids
    shares = torch.tensor([scores[key][0] if key in scores else float("nan") for key in ids])
    named = dict(zip(ids, source.class_names, strict=True))
    rows = [
        {"class": named[key], "AP": cell("ap", ap), "AP50": cell("ap50", ap50), "objects": f"{count:,}"}
        for key, (ap, ap50, count) in scores.items()
    ]
    lacking = len(ids) - len(rows)
    told = (
        f"AP is the mean over IoU 0.50 to 0.95. {lacking} classes have no object in the data."
        if lacking
        else ("AP is the mean over IoU 0.50 to 0.95.")
    )
    if not rows:
        return [paragraph("The data has no objects.")]
    return [
        picture(draw.class_shares(shares, source.class_names, "AP"), "AP of each class"),
        table(rows),
        paragraph(told),
    ]


@torch.inference_mode()
def _judge_maps(network: nn.Module, source: Any, device: torch.device) -> list[Section]:
    """Intersection over union of each class, and which classes are taken for which."""
    names = source.class_names
    confusion = torch.zeros(len(names), len(names), dtype=torch.int64)
    for images, maps in source.val_dataloader():
        logits = network(images.to(device)).float()
        if logits.shape[-2:] != maps.shape[-2:]:
            logits = interpolate(logits, maps.shape[-2:], mode="bilinear", align_corners=False)
        answers = logits.argmax(1).cpu()
        confusion += multiclass_confusion_matrix(answers, maps, len(names), ignore_index=IGNORED)
    overlap, accuracy, pixels = overlaps_by_class(confusion)
    shown = picture(draw.class_shares(overlap, names, "IoU"), "intersection over union of each class")
    rows = [
        {
            "class": names[place],
            "IoU": _share(overlap[place]),
            "right pixels": _share(accuracy[place]),
            "pixels": f"{int(pixels[place]):,}",
        }
        for place in range(len(names))
    ]
    return [
        ("Intersection over union of each class", [shown, table(rows)]),
        ("Confused classes", _confusions(confusion, names)),
    ]


def _confusions(confusion: Tensor, names: Sequence[str]) -> list[str]:
    errors = confusion - torch.diag(confusion.diag())
    order = errors.flatten().argsort(descending=True, stable=True)[:PAIRS].tolist()
    pairs = [(*divmod(place, len(names)), errors.flatten()[place].item()) for place in order]
    rows = [
        {
            "true": names[true],
            "answered": names[answered],
            "pixels": f"{count:,}",
            "of the class": f"{100 * count / confusion[true].sum().item():.1f} %",
        }
        for true, answered, count in pairs
        if count
    ]
    shown = picture(draw.confusion_matrix(confusion, names), "pixels of each true class by the answered one")
    return [shown, *([table(rows)] if rows else [paragraph("No pixel is answered wrongly.")])]


def _about_pictures(restored: Restored) -> str:
    objects = f", objects with a score of {100 * THRESHOLD:g} % or more" * isinstance(restored.task, Detection)
    return paragraph(f"Images evenly chosen from the data; the truth to the left, the answer to the right{objects}.")


@torch.inference_mode()
def _pictures(restored: Restored, network: nn.Module, source: Any, device: torch.device) -> Iterator[str]:
    dataset = source.val_set()
    pair = _object_pair if isinstance(restored.task, Detection) else _map_pair
    for place in torch.linspace(0, len(dataset) - 1, min(SHOWN, len(dataset))).round().long().tolist():
        item = dataset[place]
        if not isinstance(item, str):
            yield photo(side_by_side(*pair(network, source, *item, device)), f"image {place + 1}: truth and answer")


def _object_pair(
    network: nn.Module, source: DenseSource, image: Tensor, target: dict[str, Any], device: torch.device
) -> tuple[Tensor, Tensor]:
    names, shown = source.class_names, _displayed(image, source)
    found = {key: value.cpu() for key, value in network([image.to(device)])[0].items()}
    order = found["scores"].argsort(descending=True, stable=True)
    clear = order[found["scores"][order] >= THRESHOLD]
    answer = {key: value[clear] for key, value in found.items()}
    truth = [
        names[label] + " (crowd)" * crowd for label, crowd in zip(target["labels"], target["iscrowd"], strict=True)
    ]
    said = [
        f"{names[label]}: {100 * score:.0f} %" for label, score in zip(answer["labels"], answer["scores"], strict=True)
    ]
    left, right = (
        draw_objects(shown, part["boxes"], part["labels"].tolist(), words, len(names), _masks(part))
        for part, words in ((target, truth), (answer, said))
    )
    return left, right


def _masks(part: Mapping[str, Any]) -> Tensor | None:
    return part["masks"].bool() if "masks" in part else None


def _map_pair(
    network: nn.Module, source: DenseSource, image: Tensor, labels: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    size = tuple(labels.shape)
    answer = label_map(network, image.to(device), size)
    shown = F.resize(_displayed(image, source), list(size))
    return draw_map(shown, labels, source.class_names), draw_map(shown, answer, source.class_names)


def _displayed(image: Tensor, source: DenseSource) -> Tensor:
    """uint8 (3, height, width): the picture before it was normalized."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (source.mean, source.std))
    return ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def _share(value: Tensor) -> str:
    return "–" if value.isnan() else f"{100 * value:.1f} %"
