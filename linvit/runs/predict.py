"""`linvit predict`: the most probable classes of image files, on the screen or as CSV or JSON."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor, nn
from torchvision.datasets.folder import IMG_EXTENSIONS

from linvit.data.images.image import CorruptImageError, Preprocessing, open_image
from linvit.files import replacing
from linvit.runs.restore import Restored
from linvit.runs.screen import show as show_table

BATCH = 32


@dataclass(frozen=True)
class Prediction:
    """The classes of one image file, most probable first, with their probabilities in 0..1."""

    image: str
    classes: list[str]
    probabilities: list[float]


def predict(
    restored: Restored, images: Sequence[str | Path], topk: int = 5, weights: str | None = None
) -> tuple[list[Prediction], list[str]]:
    """Predictions for image files and folders, and the sentences that name the unreadable files among them.

    weights: "raw" or "ema"; by default the moving average where there is one. Raises ValueError for paths without
    images, and for weights that the checkpoint does not hold.
    """
    if topk < 1:
        raise ValueError(f"--topk is {topk}, but at least one class has to be shown: set it to 1 or more.")
    network, device = ready_network(restored, weights)
    predictions: list[Prediction] = []
    complaints: list[str] = []
    for paths, batch in _batches(find_images(images), restored.preprocessing, complaints):
        values, indices = _probabilities(network, batch.to(device)).topk(min(topk, len(restored.class_names)))
        for path, row, places in zip(paths, values.tolist(), indices.tolist(), strict=True):
            predictions.append(Prediction(str(path), [restored.class_names[place] for place in places], row))
    return predictions, complaints


def ready_network(restored: Restored, weights: str | None) -> tuple[nn.Module, torch.device]:
    """The network of "raw" or "ema" weights, by default the moving average where there is one, and where it runs."""
    networks = restored.task.networks()
    weights = weights or ("ema" if "ema" in networks else "raw")
    if weights not in networks:
        raise ValueError(f"The checkpoint holds no {weights!r} weights, but {', '.join(networks)}: choose one of them.")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return networks[weights].to(device).eval(), device


def find_images(paths: Sequence[str | Path]) -> list[Path]:
    """The files among paths and the image files in the folders among them, sorted; raises ValueError for none."""
    return find_files(paths, IMG_EXTENSIONS, "image", "image")


def find_files(paths: Sequence[str | Path], suffixes: Sequence[str], kind: str, one: str) -> list[Path]:
    """The files among paths and those of these suffixes in the folders among them, sorted; ValueError for none.

    kind and one say in words what is looked for: "{kind} files", "no {one}".
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes)
            if not inside:
                listed = ", ".join(suffixes[:3]) + " …" * (len(suffixes) > 3)
                raise ValueError(f"The folder {path} has no {kind} files in it ({listed}).")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise ValueError(f"There is no {one} or folder at {path}: check the path.")
    return found


def _batches(
    paths: list[Path], preprocessing: Preprocessing, complaints: list[str]
) -> Iterator[tuple[list[Path], Tensor]]:
    transform = preprocessing.transform()
    ready: list[tuple[Path, Tensor]] = []
    for place, path in enumerate(paths, 1):
        try:
            ready.append((path, transform(open_image(path, preprocessing.channels))))
        except CorruptImageError as error:
            complaints.append(str(error))
        if ready and (len(ready) == BATCH or place == len(paths)):
            yield [path for path, _ in ready], torch.stack([image for _, image in ready])
            ready = []


@torch.inference_mode()
def _probabilities(network: nn.Module, images: Tensor) -> Tensor:
    return network(images).float().softmax(-1).cpu()


def show(predictions: list[Prediction]) -> None:
    """Prints one row an image."""
    table = Table("image", "classes, most probable first")
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        table.add_row(prediction.image, ", ".join(f"{name} {100 * value:.1f} %" for name, value in pairs))
    show_table(table)


def check_output(path: str | Path) -> Path:
    """The path itself; raises ValueError for an ending that cannot be written."""
    if Path(path).suffix not in WRITERS:
        raise ValueError(
            f"The output {path} has an unknown ending: only {' and '.join(WRITERS)} can be written of a classifier's"
            " answers, folders of those of detectors and segmentors."
        )
    return Path(path)


def write(predictions: list[Prediction], path: str | Path) -> None:
    """Writes a .csv (one row an image) or .json (one list) file, whole or not at all; raises as check_output."""
    path = check_output(path)
    with replacing(path) as temporary:
        temporary.write_text(WRITERS[path.suffix](predictions), encoding="utf-8")


def _as_csv(predictions: list[Prediction]) -> str:
    count = max((len(prediction.classes) for prediction in predictions), default=0)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image", *(f"{name}_{place}" for place in range(1, count + 1) for name in ("class", "probability"))])
    for prediction in predictions:
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        rows.writerow([prediction.image, *(part for name, value in pairs for part in (name, f"{value:.6f}"))])
    return text.getvalue()


def _as_json(predictions: list[Prediction]) -> str:
    return json.dumps(
        [
            {
                "image": prediction.image,
                "predictions": [
                    {"class": name, "probability": round(value, 6)}
                    for name, value in zip(prediction.classes, prediction.probabilities, strict=True)
                ],
            }
            for prediction in predictions
        ],
        indent=1,
        ensure_ascii=False,
    )


WRITERS = {".csv": _as_csv, ".json": _as_json}
