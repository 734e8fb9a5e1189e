"""`linvit eval --report`: a page on what a network gets right, confuses, how sure it is of it, and how fast."""

import csv
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from linvit.analysis import judged_figures as draw
from linvit.analysis.figures import training_curve
from linvit.analysis.judged import BINS, Judged, confused_pairs, expected_calibration_error, per_class
from linvit.analysis.report import paragraph, picture, table, write_page
from linvit.data import Source
from linvit.runs.restore import Restored, source_for

PAGE = "report.html"
PAIRS, PICTURED, EXAMPLES = 20, 8, 6
ROUNDS, SPEED_BATCH = 9, 64


class Numbered(Dataset[Any]):
    """(image, (target, index)) of a data set, so that an image is found again; a complaint passes as it is."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        item = self.dataset[index]
        return item if isinstance(item, str) else (item[0], torch.tensor([int(item[1]), index]))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]


def report_path(restored: Restored, given: str) -> Path:
    """Where the page goes: as given, or report.html in the run's folder, beside the file where there is no run."""
    return Path(given) if given else restored.folder / PAGE


def write_report(
    restored: Restored,
    measured: dict[str, dict[str, float]],
    path: Path,
    data: str | None = None,
    num_workers: int | None = None,
) -> None:
    """Writes the page of a network on the images of source_for(restored, data); measured is what `evaluate` returned.

    The moving average is judged where there is one, as in `linvit predict`. Raises as source_for.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = restored.judged.to(device).eval()
    source = source_for(restored, data, num_workers)
    judged, seconds = judge(network, source, device)
    speed, batch = images_per_second(network, source, judged, device)
    sections = [
        ("What was measured", _summary(restored, measured)),
        *curve(restored),
        ("Accuracy of each class", _classes(judged)),
        ("Most confused pairs", _confusion(judged, source)),
        ("Calibration", _calibration(judged)),
        ("Throughput", _throughput(speed, batch, len(judged.targets) / seconds, device, source)),
    ]
    write_page(path, f"linvit: {restored.title}", sections)


@torch.inference_mode()
def judge(network: nn.Module, source: Source, device: torch.device) -> tuple[Judged, float]:
    """The network's answer to every readable validation image, and the seconds it took, reading included."""
    loader = source.val_dataloader()
    numbered = DataLoader(
        Numbered(loader.dataset), loader.batch_size, num_workers=loader.num_workers, collate_fn=loader.collate_fn
    )
    parts: list[tuple[Tensor, ...]] = []
    start = time.perf_counter()
    for images, targets, _ in numbered:
        if images is not None:
            confidences, predictions = network(images.to(device)).float().softmax(-1).max(-1)
            parts.append((targets[:, 1], targets[:, 0], predictions.cpu(), confidences.cpu()))
    seconds = time.perf_counter() - start
    if not parts:
        raise ValueError("The data has no readable image in it: nothing can be measured.")
    return Judged(*(torch.cat(column) for column in zip(*parts, strict=True)), source.class_names), seconds


@torch.inference_mode()
def images_per_second(network: nn.Module, source: Source, judged: Judged, device: torch.device) -> tuple[float, int]:
    """Median of nine passes over one batch that is already in the device's memory, and the batch's size."""
    dataset = source.val_set()
    images = torch.stack([dataset[index][0] for index in judged.indices[:SPEED_BATCH].tolist()]).to(device)
    seconds = []
    for number in range(ROUNDS + 1):
        start = time.perf_counter()
        network(images)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first pass warms up
            seconds.append(time.perf_counter() - start)
    return len(images) / statistics.median(seconds), len(images)


def _summary(restored: Restored, measured: dict[str, dict[str, float]]) -> Sequence[str]:
    rows = [
        {
            "weights": {"raw": "raw", "ema": "moving average"}[name],
            "top-1": f"{100 * row['top1']:.2f} %",
            "top-5": f"{100 * row['top5']:.2f} %",
            "loss": f"{row['loss']:.4f}",
            "images": f"{row['images']:,}",
        }
        for name, row in measured.items()
    ]
    height, width = restored.preprocessing.size
    pattern = getattr(restored.judged, "pattern", None)
    facts = (f"{len(restored.class_names):,} classes", f"{height}×{width} px")
    told = restored.told(*((f"pattern {pattern}",) if pattern else ()), *facts)
    return [table(rows), paragraph(told)]


def curve(restored: Restored) -> list[tuple[str, Sequence[str]]]:
    """The section on a run's training, from the metrics.csv in its folder; none where there is no such file."""
    path = restored.folder / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        rows = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
    return [("Training", [picture(training_curve(rows), "losses, scores and learning rate over the epochs")])]


def _classes(judged: Judged) -> Sequence[str]:
    accuracy, counts = per_class(judged)
    known = accuracy[counts > 0]
    told = f"Mean over classes {100 * known.mean():.2f} %, lowest {100 * known.min():.2f} %."
    return [picture(draw.class_accuracies(judged), "accuracy of each class"), paragraph(told)]


def _confusion(judged: Judged, source: Source) -> Sequence[str]:
    pairs = confused_pairs(judged, PAIRS, EXAMPLES)
    wrong = int((~judged.right).sum())
    if not pairs:
        return [paragraph(f"None: all {len(judged.targets):,} images are read rightly.")]
    rows = [
        {
            "true": judged.class_names[pair.true],
            "read as": judged.class_names[pair.read],
            "images": pair.count,
            "of the class": f"{100 * pair.share:.1f} %",
        }
        for pair in pairs
    ]
    dataset = source.val_set()
    shown = draw.confused_images(
        judged, pairs[:PICTURED], lambda index: source.preprocessing.displayed(dataset[index][0])
    )
    told = f"{wrong:,} of {len(judged.targets):,} images are read wrongly; the table has the most frequent pairs."
    return [paragraph(told), table(rows), paragraph("The surest mistakes first:"), picture(shown, "confused images")]


def _calibration(judged: Judged) -> Sequence[str]:
    confidence, error = judged.confidences.mean().item(), expected_calibration_error(judged)
    told = (
        f"Expected calibration error {100 * error:.2f} % ({BINS} bins of equal width). Mean confidence"
        f" {100 * confidence:.2f} %, accuracy {100 * judged.right.double().mean():.2f} %."
    )
    return [picture(draw.calibration_curve(judged), "accuracy against confidence"), paragraph(told)]


def _throughput(speed: float, batch: int, whole: float, device: torch.device, source: Source) -> Sequence[str]:
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()} CPU"
    rows = [
        {"what": f"network alone, batch of {batch}, median of {ROUNDS}", "images/s": f"{speed:,.1f}"},
        {"what": f"reading and network, batches of {source.batch_size}", "images/s": f"{whole:,.1f}"},
    ]
    told = f"{where}, float32, threads: {torch.get_num_threads()}, reading processes: {source.num_workers}."
    return [table(rows), paragraph(told)]
