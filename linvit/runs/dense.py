"""Shared by detection and segmentation: networks on a backbone, predictions in a folder, and reports."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2 import functional as F

from linvit.analysis.dense_images import side_by_side
from linvit.analysis.report import paragraph, pixel_image
from linvit.data.dense.source import DensePreprocessing
from linvit.data.images.image import CorruptImageError
from linvit.data.source import Source
from linvit.environment import memory
from linvit.errors import SettingError, refuse
from linvit.files import check_writable, replacing, user_path
from linvit.models.by_name import known_arguments
from linvit.models.dense.backbone import DenseBackbone
from linvit.models.dense.frameworks import build_dense
from linvit.runs.analyze import ImageRun, Subject
from linvit.runs.evaluate import prepared_for
from linvit.runs.images import find_images, read_image
from linvit.runs.predictions import Predictions
from linvit.runs.progress import tracked
from linvit.runs.report import Section
from linvit.runs.trained import Trained

AT_ONCE = 1 << 26  # elements of masks or logits at the size of the file, kept in memory at the same time
SHOWN = 8  # images of a report
PIXEL_BYTES = 64  # measured: 9.9 GiB for a segmentor on an image of 13,000 × 13,000 px
OVERLAYS = "overlays"

Saver = Callable[[Any, Tensor], None]
"""Writes a prediction and its image, uint8 (3, height, width)."""


class DenseRun(ImageRun):
    """A run of a detector or segmentor: a framework on a timm backbone."""

    frameworks: ClassVar[Iterable[str]]
    preprocessing_class = DensePreprocessing

    @classmethod
    def create_network(cls, model: dict[str, Any], num_classes: int, channels: int) -> nn.Module:
        framework, backbone = model.get("framework"), model.get("backbone")
        refuse(
            framework not in list(cls.frameworks)
            and f"`framework` is {framework!r}, expected for {cls.task_name} one of {', '.join(cls.frameworks)}: choose"
            " one.",
            not backbone and "The model needs a `backbone`: set it to a name that `linvit models` lists.",
        )
        with known_arguments(model["backbone"], model):
            return build_dense(**model, num_classes=num_classes)

    @classmethod
    def title(cls, model: dict[str, Any], network: nn.Module) -> str:
        return f"{model['framework']} on {model['backbone']}"

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        if "class_names" in changes:
            raise SettingError("`class_names` cannot be changed, because the network fixes its classes: leave it out.")
        source = self.create_source(name, stored | changes | {"class_names": self.class_names})
        return prepared_for(self, source, changes)

    def facts(self, source: Source) -> tuple[str, ...]:
        inputs = cast(DensePreprocessing, source.preprocessing)
        scaled = (
            f"images scaled to fit {inputs.short_side} px on their short side and {inputs.long_side} px on the long"
        )
        return f"{len(self.class_names)} classes", scaled

    def subject(self) -> Subject:
        network = self.network
        backbone = next((module for module in network.modules() if isinstance(module, DenseBackbone)), network)
        transform = self.preprocessing.transform()

        def shown(image: Tensor) -> Tensor:
            return displayed(image, self.preprocessing).movedim(0, -1) / 255

        return Subject(backbone, lambda images, labels: images, shown, transform, ", its backbone")

    def json_writer(self, path: Path) -> contextlib.AbstractContextManager[Callable[[Any], None]]:
        """A context manager that yields a function writing one prediction at a time to a JSON file."""
        raise SettingError("Label maps cannot be saved as .json: call `save` with a folder.")

    def save_one_by_one(self, folder: Path) -> contextlib.AbstractContextManager[Saver]:
        """A context manager that yields a function writing one prediction at a time to a folder."""
        raise NotImplementedError

    def predict_each(
        self,
        inputs: Sequence[Any],
        predicted: Callable[[nn.Module, Tensor, str, tuple[int, int]], Any],
        without_pixels: Callable[[Any], Any],
        weights: str | None,
        output: str | Path | None,
        progress: bool,
    ) -> "DensePredictions":
        """Predictions for images of any size; with an output folder, masks and maps are written there and not kept.

        predicted: computes a prediction from network, normalized image, name and file size (height, width).
        """
        folder = None if output is None else checked_folder(output, inputs)
        items, unreadable = find_images(inputs)
        if folder is not None:  # an earlier call may have left images in it
            inside = folder.resolve()
            items = [(n, i) for n, i in items if not (isinstance(i, Path) and i.resolve().is_relative_to(inside))]
            refuse(not items and f"All input images are in the output folder {folder}: choose another folder.")
        network, device = self.placed_network(weights)
        transform = self.preprocessing.transform()
        rows, kept = [], []
        with self.save_one_by_one(folder) if folder else contextlib.nullcontext() as save:
            for name, item in tracked(items, "Predicting", progress=progress):
                try:
                    opened = read_image(item, name)
                    needed, there = PIXEL_BYTES * opened.width * opened.height, memory()
                    if needed > there:
                        raise CorruptImageError(
                            f"{name} is {opened.height:,}×{opened.width:,} px, whose prediction needs about"
                            f" {needed / 2**30:.0f} GiB of memory, and this machine has {there / 2**30:.0f} GiB: make"
                            " the image smaller."
                        )
                    image = F.pil_to_tensor(opened)
                except CorruptImageError as error:
                    unreadable.append(str(error))
                    continue
                with torch.inference_mode():
                    row = predicted(network, transform(image).to(device), name, tuple(image.shape[-2:]))
                if save:
                    save(row, image)
                    row = without_pixels(row)
                rows.append(row)
                kept.append(item)
        return DensePredictions(self, rows, unreadable, kept, folder)


class DensePredictions(Predictions[Any]):
    """Predictions of a detector or segmentor, which are saved as a folder."""

    def __init__(
        self,
        run: DenseRun,
        rows: Iterable[Any],
        unreadable: Iterable[str],
        items: Sequence[Any],
        written: Path | None,
    ) -> None:
        super().__init__(rows, unreadable)
        self._run, self._items, self._written = run, items, written

    def to_csv(self, path: str | Path) -> None:
        raise SettingError("Objects and label maps cannot be saved as .csv: call `save` with a folder.")

    def to_json(self, path: str | Path) -> None:
        self._check_kept()
        with self._run.json_writer(Path(path)) as write:
            for row in self:
                write(row)

    def save(self, path: str | Path) -> None:
        """Writes the same folder as the option `output` of `predict`."""
        self._check_kept()
        with self._run.save_one_by_one(checked_folder(path, self._items)) as save:
            for row, item in zip(self, self._items, strict=True):
                save(row, F.pil_to_tensor(read_image(item, row.file)))

    def _check_kept(self) -> None:
        if self._written is not None:
            raise SettingError(
                f"Masks and maps were written to {self._written} and not kept: call `predict` without `output`."
            )


def at_once(size: tuple[int, int]) -> int:
    """How many masks of this size are kept in memory at the same time."""
    return max(1, AT_ONCE // (size[0] * size[1]))


def save_pixels(pixels: Tensor, path: Path) -> None:
    """Saves uint8 (3, height, width) or (height, width) as PNG or JPEG, by the ending of the path."""
    array = pixels.movedim(0, -1).contiguous().numpy() if pixels.ndim == 3 else pixels.numpy()
    options = {"format": "PNG"} if path.suffix == ".png" else {"format": "JPEG", "quality": 92, "subsampling": 0}
    with replacing(path) as temporary:
        Image.fromarray(np.ascontiguousarray(array)).save(temporary, **options)


def truth_and_answer(
    run: Trained, source: Source, overlays: Callable[..., tuple[Tensor, Tensor]], words: str
) -> Section:
    """Evenly spaced images of the data, with the ground truth on the left and the prediction on the right.

    overlays: draws both, from network, source, normalized image, target and device.
    """
    network, device = run.placed_network()
    dataset = source.val_set()
    places = torch.linspace(0, len(dataset) - 1, min(SHOWN, len(dataset))).round().long().tolist()  # type: ignore[arg-type]
    images = []
    with torch.inference_mode():
        for index in places:
            item = dataset[index]
            if not isinstance(item, str):
                picture = side_by_side(*overlays(network, source, *item, device))
                images.append(pixel_image(picture, f"image {index + 1}: ground truth and prediction"))
    return "Images", [paragraph(f"Evenly spaced images of the data: the ground truth on the left, {words}."), *images]


def displayed(image: Tensor, preprocessing: DensePreprocessing) -> Tensor:
    """The image before normalization, uint8 (3, height, width)."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    return ((image * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)


def checked_folder(output: str | Path, inputs: Sequence[Any]) -> Path:
    folder = user_path(output)
    paths = (Path(item) for item in inputs if isinstance(item, str | Path))
    refuse(
        (folder.suffix in (".csv", ".json") or (folder.exists() and not folder.is_dir()))
        and f"`output` is {folder}, expected a folder, because detectors and segmentors write many files: give one.",
        *(
            path.exists()
            and path.resolve().is_relative_to(folder.resolve())
            and f"The output folder {folder} contains the input images {path}: choose another folder."
            for path in paths
        ),
    )
    check_writable(folder)
    return folder
