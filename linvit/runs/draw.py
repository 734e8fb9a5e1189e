"""`linvit generate` of a run that draws images: a grid of them as one picture, or all of them in one file."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.utils import make_grid

from linvit.data import GenerationPreprocessing
from linvit.files import check_writable, replacing
from linvit.runs.predict import ready_network
from linvit.runs.restore import Restored
from linvit.tasks import Diffusion
from linvit.tasks.sampling import sample

BATCH = 128
SMALLEST = 48  # pixels of an image in the grid: smaller ones are enlarged, pixel by pixel
SUFFIXES = (".png", ".npz")


def draw(
    restored: Restored,
    output: Path,
    classes: Sequence[str] | None = None,
    count: int = 8,
    guidance: float = 1.0,
    steps: int = 50,
    sampler: str = "ddim",
    seed: int = 0,
    weights: str | None = None,
    decoder: str | None = None,
) -> int:
    """Draws `count` images of each class into output and returns how many; the same arguments give the same images.

    Args:
        output: .png for a grid with a row a class; .npz for uint8 (images, height, width, 3) as `arr_0` and int64
            `labels`, which ADM's evaluation suite reads.
        classes: names or numbers; all where there are none.
        decoder: the autoencoder of latents, a folder or a name on the Hugging Face hub; that of the data by default.

    Raises ValueError for a run that draws no images, an unknown class or sampler, a file of another kind and numbers
    that cannot be, and OSError, before anything is drawn, for a folder that cannot be written.
    """
    if not isinstance(restored.task, Diffusion) or not isinstance(restored.preprocessing, GenerationPreprocessing):
        raise ValueError(f"{restored.path} draws no images: give the run of an image generator.")
    _check(output, count, guidance, seed)
    network, device = ready_network(restored, weights)
    chosen = [_number(name, restored.class_names) for name in classes or restored.class_names]
    labels = torch.tensor(chosen).repeat_interleave(count)
    canvas = restored.preprocessing
    decoder = _decoder(canvas, decoder)
    check_writable(output.parent)
    pictures = []
    for number, part in enumerate(labels.split(BATCH)):
        # seeds of the batches of one drawing are apart from those of the next
        drawn_seed = int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        images = sample(network, part.to(device), steps, guidance, sampler, drawn_seed, restored.task.clips)
        if not images.isfinite().all():
            raise ValueError(f"{restored.path} draws no finite numbers here: lower --guidance, or train it anew.")
        pictures.append(_pixels(canvas, images, decoder).cpu())
    everything = torch.cat(pictures)
    with replacing(output) as temporary:
        _write_grid(everything, count, temporary) if output.suffix == ".png" else _write_all(
            everything, labels, temporary
        )
    return len(labels)


def _check(output: Path, count: int, guidance: float, seed: int) -> None:
    if output.suffix not in SUFFIXES:
        raise ValueError(f"The output {output} is neither a .png nor a .npz file: name one of them.")
    if count < 1:
        raise ValueError(f"--count is {count}, but at least one image has to be drawn: set it to 1 or more.")
    if not 0 <= guidance < math.inf:
        raise ValueError(f"--guidance is {guidance:g}, expected 0 or more: 1 draws as trained, 2 exaggerates classes.")
    if seed < 0:
        raise ValueError(f"--seed is {seed}, expected 0 or more: choose another.")
    if output.is_dir():
        raise ValueError(f"The output {output} is a folder: name a file.")


def _number(name: str, class_names: Sequence[str]) -> int:
    if name in class_names:
        return list(class_names).index(name)
    if name.isdecimal() and int(name) < len(class_names):
        return int(name)
    known = ", ".join(class_names[:10])
    more = " …" if len(class_names) > 10 else ""
    raise ValueError(f"The class {name!r} is unknown: name one of {known}{more}, or its number.")


def _decoder(canvas: GenerationPreprocessing, name: str | None) -> str | None:
    """The autoencoder that is asked for, else that of the data; opened, so that a wrong one ends here."""
    if canvas.decoder is None:
        if name is not None:
            raise ValueError(f"--vae is {name}, but this run draws pixels, not latents: leave it out.")
        return None
    from linvit.data.generation.latents import open_autoencoder

    open_autoencoder(name or canvas.decoder)
    return name or canvas.decoder


def _pixels(canvas: GenerationPreprocessing, images: Tensor, decoder: str | None) -> Tensor:
    """uint8 (batch, channels, height, width)."""
    values = canvas.values(images.float())
    if decoder:
        from linvit.data.generation.latents import decoded

        values = decoded(values, decoder)
    return (values * 255).round().to(torch.uint8)


def _write_grid(images: Tensor, columns: int, path: Path) -> None:
    enlarged = -(-SMALLEST // images.shape[-1])
    images = images.repeat_interleave(enlarged, -1).repeat_interleave(enlarged, -2)
    grid = make_grid(images, nrow=columns, padding=2, pad_value=128)
    Image.fromarray(grid.movedim(0, -1).numpy()).save(path, format="PNG")


def _write_all(images: Tensor, labels: Tensor, path: Path) -> None:
    everything = images.expand(-1, 3, -1, -1).movedim(1, -1).numpy()
    with path.open("wb") as file:
        np.savez(file, arr_0=everything, labels=labels.numpy())
