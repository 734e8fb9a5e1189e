"""Runs of image generation."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from linvit.analysis.report import figure_image, paragraph
from linvit.data.generation import CifarImages, DigitImages, GenerationPreprocessing, Latents, decoded, open_autoencoder
from linvit.data.source import Source
from linvit.errors import SettingError
from linvit.files import check_output_file, replacing
from linvit.ranges import Amount, Count, Range, Some, checked
from linvit.runs.analyze import ImageRun, Subject
from linvit.runs.report import Section
from linvit.runs.run import NamedRun
from linvit.tasks.diffusion import Diffusion
from linvit.tasks.sampling import TRAIN_STEPS, sample

BATCH = 128
SMALLEST = 48  # pixels of an image in the grid: smaller ones are enlarged, pixel by pixel
SUFFIXES = (".png", ".npz")
CLASSES, COUNT, GUIDANCES = 10, 6, (1.0, 2.0)  # of a report
ANALYZED_TIME = 250


@dataclass(frozen=True)
class GeneratedImages:
    """Generated images, class by class.

    images: uint8 (images, channels, height, width). labels: int64 (images,), indices into class_names. per_class: the
    number of images of each class.
    """

    images: Tensor
    labels: Tensor
    class_names: list[str]
    per_class: int

    def __len__(self) -> int:
        return len(self.images)

    def grid(self) -> Image.Image:
        """One row per class; small images are enlarged."""
        factor = -(-SMALLEST // self.images.shape[-1])
        images = self.images.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
        grid = make_grid(images, nrow=self.per_class, padding=2, pad_value=128)
        return Image.fromarray(grid.movedim(0, -1).numpy())

    def save(self, path: str | Path) -> None:
        """Writes a .png grid, or an .npz for ADM's evaluation suite: uint8 `arr_0` (images, height, width, 3) and int64
        `labels`."""
        path = check_output_file(path, SUFFIXES)
        with replacing(path) as temporary, temporary.open("wb") as file:
            if path.suffix.lower() == ".png":
                self.grid().save(file, format="PNG")
            else:
                pixels = self.images.expand(-1, 3, -1, -1).movedim(1, -1).numpy()
                np.savez(file, arr_0=pixels, labels=self.labels.numpy())


class DiffusionRun(NamedRun, ImageRun):
    """A run of a DiT, which generates images of classes, on pixels or latents."""

    task_name = "diffusion"
    task_class = Diffusion
    sources: ClassVar = {"digit_images": DigitImages, "cifar_images": CifarImages, "latents": Latents}
    folder_source = "latents"
    preprocessing_class = GenerationPreprocessing
    kept = ("class_dropout", "generates", "sampler", "steps", "clips", "classifier")
    family = "generation"

    def open_source(self, name: str, stored: dict[str, Any], changes: dict[str, Any]) -> Source:
        if name == "latents" and self.preprocessing.decoder is None:
            raise SettingError("`root` is a folder, but this run was trained on the built-in digits: leave it out.")
        return super().open_source(name, stored, changes)

    @checked
    def generate(
        self,
        *,
        classes: Annotated[Sequence[str | int], Some()] | None = None,
        count: Count = 8,
        guidance: Annotated[float, Range(0)] = 1.0,
        steps: int = 50,
        sampler: str = "ddim",
        seed: Amount = 0,
        autoencoder: str | None = None,
        weights: str | None = None,
        output: str | Path | None = None,
    ) -> GeneratedImages:
        """Generates `count` images of each class; the same arguments give the same images.

        Args:
            classes: names (text) or indices (default: all).
            count: images per class.
            guidance: scale of classifier-free guidance (1 = off).
            steps: sampling steps, 2 to 1,000.
            sampler: "ddim" or "ddpm".
            seed: random seed.
            autoencoder: decodes latents; a folder or a name on the Hugging Face hub (default: that of the data).
            weights: "raw" or "ema"; default: the moving average, if there is one.
            output: a .png or .npz file to write as well.
        """
        path = None if output is None else check_output_file(output, SUFFIXES)
        if guidance != 1 and not cast(Diffusion, self.task).class_dropout:
            raise SettingError(
                f"`guidance` is {guidance:g}, but this network was trained with `task.class_dropout=0`, so it never"
                " generated without a class: leave `guidance` out, or train with `task.class_dropout=0.1`."
            )
        network, device = self.placed_network(weights)
        wanted = range(len(self.class_names)) if classes is None else classes
        labels = torch.tensor([_class_number(name, self.class_names) for name in wanted]).repeat_interleave(count)
        autoencoder = _known_autoencoder(self.preprocessing, autoencoder)
        images, clips = [], cast(Diffusion, self.task).clips
        for number, batch in enumerate(labels.split(BATCH)):
            # a seed of its own for each batch, which no neighbouring seed of a call repeats
            batch_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
            sampled = sample(network, batch.to(device), steps, guidance, sampler, batch_seed, clips)
            if not sampled.isfinite().all():
                raise SettingError(
                    "The generated images are not finite: lower `guidance`, or use a run that did not diverge."
                )
            values = self.preprocessing.values(sampled.float())
            if autoencoder:
                values = decoded(values, autoencoder)
            images.append((values * 255).round().to(torch.uint8).cpu())
        generated = GeneratedImages(torch.cat(images), labels, self.class_names, count)
        if path:
            generated.save(path)
        return generated

    def subject(self) -> Subject:
        noise_loss = cast(Diffusion, self.task).noise_loss

        def inputs(images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
            times = torch.full((len(images),), ANALYZED_TIME)
            noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
            return noise_loss.noised(images, times, noise), times, labels

        note = f" at time {ANALYZED_TIME} of {TRAIN_STEPS:,}, with the class of each image"
        return Subject(self.network, inputs, lambda image: _displayed(self.preprocessing, image), None, note)

    def sections(self, source: Source) -> list[Section]:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.0, 6.5), layout="constrained")
        guidances = GUIDANCES[: 2 if cast(Diffusion, self.task).class_dropout else 1]
        for axes, guidance in zip(figure.subplots(1, len(guidances), squeeze=False)[0], guidances, strict=True):
            images = self.generate(classes=self.class_names[:CLASSES], count=COUNT, guidance=guidance)
            axes.imshow(np.asarray(images.grid()))
            axes.set_title(f"guidance {guidance:g}")
            axes.set_axis_off()
        words = "Fréchet distances use the features of a small classifier: do not compare them with published FIDs."
        image = figure_image(figure, "generated images, one row per class, at guidance 1 and 2")
        return [("Generated images", [paragraph(words), image])]


def _class_number(name: str | int, class_names: Sequence[str]) -> int:
    """The index of a class, from its name or index; text is an index only if no class has a number as its name."""
    if isinstance(name, str) and name in class_names:
        return list(class_names).index(name)
    is_index = not isinstance(name, str) or (name.isdecimal() and not any(map(str.isdecimal, class_names)))
    if is_index and 0 <= int(name) < len(class_names):
        return int(name)
    first = ", ".join(class_names[:10]) + " …" * (len(class_names) > 10)
    raise ValueError(f"The class {name!r} is unknown: name one of {first}, or its number.")


def _known_autoencoder(preprocessing: GenerationPreprocessing, name: str | None) -> str | None:
    """The given autoencoder, by default that of the data. Opened here, so that a wrong one fails early."""
    if preprocessing.decoder is None:
        if name is not None:
            raise SettingError(f"`autoencoder` is {name!r}, but this run generates pixels, not latents: leave it out.")
        return None
    open_autoencoder(name or preprocessing.decoder)
    return name or preprocessing.decoder


def _displayed(preprocessing: GenerationPreprocessing, image: Tensor) -> Tensor:
    """An image as (height, width[, 3]) in 0..1; for latents, the mean over their channels."""
    values = preprocessing.values(image[None])[0]
    if preprocessing.decoder is not None:
        values = values.mean(0, keepdim=True)
        values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-6)
    return values[0] if len(values) == 1 else values.movedim(0, -1)
