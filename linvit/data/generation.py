"""Images to train generators on: pixels of digits and of CIFAR, and latents.

Latents are images encoded by an autoencoder of diffusers, written once and read from .safetensors files.

root/latents.json has classes, autoencoder, scale and sizes. root/train/*.safetensors and root/val/*.safetensors have
`moments`, float16 (images, 2, 2·channels, height, width): mean and logarithm of the standard deviation for each image
and its mirror image, and `labels`, int64 (images,). Training samples a new latent each time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from timm.data.transforms import CenterCropOrPad
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.transforms import Compose, Normalize, RandomHorizontalFlip, ToTensor
from torchvision.transforms.functional import pil_to_tensor

from linvit.data.disk import check_regular, read_json
from linvit.data.images.folder import ImageFiles, ImageFolder
from linvit.data.images.image import LARGEST
from linvit.data.images.small import SIDE, Cifar, Digits
from linvit.data.order import Batches
from linvit.data.source import Content, Contents, Source, Workers
from linvit.errors import SettingError
from linvit.files import check_writable, explained, replacing, user_path, write_json
from linvit.ranges import Count, Range, Seed, Share, check

ABOUT = "latents.json"
SPLITS = ("train", "val")
SHARD = 2048
STORED: dict[str, Any] = {
    "channels": Annotated[int, Range(1, 4096)],
    "size": tuple[Count, Count],
    "scale": Annotated[float, Range(above=0)],
    "shift": float,
    "class_names": list[str],
    "vae": str,
}


@dataclass(frozen=True)
class GenerationPreprocessing:
    """The size (height, width) of generated images or latents, and how a network's output becomes an image.

    mean, std: per channel; output × std + mean are pixels in 0..1, or the input of an autoencoder's decoder. decoder:
    the autoencoder of latents, a folder or a name on the Hugging Face hub; None for pixels.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    decoder: str | None = None

    @property
    def channels(self) -> int:
        return len(self.mean)

    def transform(self) -> Callable[[Any], Tensor]:
        """The transform from a PIL image to a float32 tensor (channels, height, width), for pixels of this size."""
        return Compose([ToTensor(), Normalize(self.mean, self.std)])

    def values(self, images: Tensor) -> Tensor:
        """Images (batch, channels, height, width) × std + mean; pixels are clamped to 0..1."""
        mean, std = (
            torch.tensor(v, dtype=images.dtype, device=images.device)[:, None, None] for v in (self.mean, self.std)
        )
        values = images * std + mean
        return values if self.decoder else values.clamp(0, 1)


class DigitImages(Digits):
    """Real digits, 8×8 grey pixels in −1 … 1, to train generators on.

    Args:
        size: Side in pixels; sizes other than 8 are interpolated bilinearly.
        options: See Digits.
    """

    fixed = ("channels", "max_shift")
    task = "diffusion"
    preprocessing: GenerationPreprocessing  # type: ignore[assignment]

    def __init__(self, size: Annotated[int, Range(1, LARGEST)] = 8, batch_size: Count = 128, **options: Any) -> None:
        super().__init__(32, 1, batch_size, 0, **options)
        self.preprocessing = GenerationPreprocessing((size, size), (0.5,), (0.5,))


class CifarImages(Cifar):
    """The images of CIFAR-10 or CIFAR-100, RGB pixels in −1 … 1; half of the training images are mirrored.

    Args:
        root, class_names, held_out, split: See Cifar.
        batch_size: Images per batch.
        seed: Seed of order and mirroring of the training images.
        num_workers: Processes that read images.
    """

    task = "diffusion"
    preprocessing: GenerationPreprocessing  # type: ignore[assignment]

    def __init__(
        self,
        root: str,
        class_names: list[str] | None = None,
        held_out: Share = 0.0,
        split: Seed = 0,
        batch_size: Count = 128,
        seed: Seed = 0,
        num_workers: Workers = 0,
    ) -> None:
        super().__init__(root, class_names, held_out, split, batch_size=batch_size, seed=seed, num_workers=num_workers)
        self.preprocessing = GenerationPreprocessing((SIDE, SIDE), (0.5,) * 3, (0.5,) * 3)

    def train_transform(self) -> Callable[[Any], Tensor]:
        return Compose([RandomHorizontalFlip(), self.preprocessing.transform()])


class Latents(Source):
    """Latents that make_latents wrote, with a variance of about one.

    Args:
        root: Folder with latents.json, train/ and val/.
        batch_size: Images per batch.
        seed: Seed of order, mirroring and sampling of the training latents.
        num_workers: Processes that read files.
    """

    task = "diffusion"
    preprocessing: GenerationPreprocessing

    def __init__(self, root: str, batch_size: Count = 256, seed: Seed = 0, num_workers: Workers = 0) -> None:
        super().__init__(batch_size, seed, num_workers)
        self.root = user_path(root)
        path = self.root / ABOUT
        damaged = (
            f"{path} is missing or damaged: set `root` to a folder that make_latents wrote, or make the latents again,"
            " complete files are kept."
        )
        with explained(damaged, (ValueError, KeyError, TypeError), SettingError):
            about = {"shift": 0.0} | read_json(path)  # earlier files have none
            check(STORED, {name: about[name] for name in STORED})
        self.class_names, self.scale, self.shift = about["class_names"], about["scale"], about["shift"]
        self.shape = (2, 2 * about["channels"], *about["size"])
        height, width = about["size"]
        mean, std = (self.shift,) * about["channels"], (1 / self.scale,) * about["channels"]
        self.preprocessing = GenerationPreprocessing((height, width), mean, std, about["vae"])

    @classmethod
    def found_in(cls, root: Path) -> dict[str, Any] | None:
        return {"name": "latents", "root": str(root)} if (root / ABOUT).exists() else None

    def contents(self, split: str) -> Contents:
        def content(sample: tuple[Tensor, Tensor]) -> Content:
            return Content(tuple(sample[0].shape[-2:]), {"images": {int(sample[1]): 1}})

        return Contents(self._files(split, samples=False), content)

    def train_set(self) -> Dataset[Any]:
        return self._files("train", samples=True)

    def val_set(self) -> Dataset[Any]:
        return self._files("val", samples=False)

    def _files(self, split: str, samples: bool) -> Dataset[Any]:
        folder = self.root / split
        files = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
        if not files:
            raise ValueError(f"The folder {folder} has no .safetensors files: make the latents again.")
        return ConcatDataset(
            [LatentFile(file, self.scale, self.shift, samples, self.shape, self.num_classes) for file in files]
        )


class LatentFile(Dataset[Any]):
    """(latent, label) of each image in a file: a random sample of the image or its mirror image, or the image's mean.

    samples: whether to sample. shape: (2, 2·channels, height, width) of the moments of an image.
    """

    def __init__(
        self, file: Path, scale: float, shift: float, samples: bool, shape: tuple[int, ...], num_classes: int
    ) -> None:
        self.file, self.scale, self.shift, self.samples = file, scale, shift, samples
        self.opened: Any = None
        with _reading(file):
            opened: Any = safe_open(file, "pt")
            self.labels = labels = opened.get_tensor("labels")
            fits = opened.get_slice("moments").get_shape() == [*labels.shape, *shape]
            if labels.dtype != torch.int64 or not fits or ((labels < 0) | (labels >= num_classes)).any():
                raise SafetensorError("these are no latents of these images")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.opened is None:
            with _reading(self.file):
                self.opened = safe_open(self.file, "pt")
        mirrored = int(torch.randint(2, ())) if self.samples else 0
        mean, log_std = self.opened.get_slice("moments")[index, mirrored].float().chunk(2)
        latent = mean + log_std.exp() * torch.randn_like(mean) if self.samples else mean
        return (latent - self.shift) * self.scale, self.labels[index]

    def __len__(self) -> int:
        return len(self.labels)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"opened": None}  # each worker opens its own


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises ValueError for a file that is not regular, or is damaged in what is read of it meanwhile."""
    sentence = f"{path} is damaged: delete it and make the latents again, the other files are kept."
    with explained(sentence, (SafetensorError, OSError)):
        check_regular(path)
        yield


def make_latents(
    images: str, folder: str | Path, vae: str, size: int = 256, batch: int = 16
) -> Iterator[tuple[str, int, int]]:
    """Encodes both splits of an image folder; yields (split, done, total) after each file.

    An image is halved until its shorter side is below twice the size, scaled to the size and centre-cropped, as in the
    training of ADM. Files that are complete are kept; each records its autoencoder and size.
    """
    source = ImageFolder(images)
    datasets = {split: ImageFiles(source.files(split), lambda image: _squared(image, size), 3) for split in SPLITS}
    folder = Path(folder)
    check_writable(folder)
    autoencoder, device = open_autoencoder(vae)  # may be downloaded, so everything else is checked first
    multiple = 2 ** (len(autoencoder.config.block_out_channels) - 1)
    if not 1 <= size <= LARGEST or size % multiple:
        raise SettingError(
            f"`size` is {size} px, but this autoencoder needs a multiple of {multiple} up to {LARGEST:,}: change it."
        )
    made_of = {"vae": vae, "image_size": str(size)}
    shape: list[int] = []
    for split, files in datasets.items():
        for start in range(0, len(files), SHARD):
            stop = min(start + SHARD, len(files))
            path = folder / split / f"{start:08d}.safetensors"
            if not path.is_file():
                moments, labels = _encoded(autoencoder, device, Batches(Subset(files, range(start, stop)), batch))
                with replacing(path) as temporary:
                    save_file({"moments": moments, "labels": labels}, temporary, made_of)
            with _reading(path):
                file: Any = safe_open(path, "pt")
                labels = file.get_tensor("labels").tolist()
            same = labels == [label for _, label in files.files[start:stop]]
            if (file.metadata() or made_of) != made_of or not same:
                raise ValueError(
                    f"{path} has latents from other images, another autoencoder or another size: choose a new folder,"
                    " or delete this one."
                )
            shape = list(file.get_slice("moments").get_shape())
            yield split, stop, len(files)
    about = {
        "class_names": list(source.class_names),
        "vae": str(Path(vae).resolve()) if Path(vae).is_dir() else vae,
        "scale": autoencoder.config.scaling_factor,
        "shift": autoencoder.config.shift_factor or 0.0,
        "channels": shape[2] // 2,
        "size": shape[3:],
        "image_size": size,
    }
    write_json(folder / ABOUT, about, indent=1)


@torch.no_grad()
def _encoded(autoencoder: Any, device: torch.device, batches: Batches) -> tuple[Tensor, Tensor]:
    moments, labels = [], []
    for images, targets in batches:
        pixels = images.to(device)
        both = [autoencoder.encode(view).latent_dist for view in (pixels, pixels.flip(-1))]
        values = [torch.cat((view.mean, view.std.clamp(min=1e-6).log()), 1).cpu() for view in both]
        moments.append(torch.stack(values, 1).half())
        labels.append(targets)
    return torch.cat(moments), torch.cat(labels)


def _squared(image: Image.Image, size: int) -> Tensor:
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    pixels: Tensor = pil_to_tensor(CenterCropOrPad(size)(image))
    return pixels.float() / 127.5 - 1


@cache
def open_autoencoder(name: str) -> tuple[Any, torch.device]:
    """The AutoencoderKL in a folder, or of a name on the Hugging Face hub, which is downloaded, and its device."""
    with explained("Latents need diffusers, which is not installed: pip install 'linvit[generation]'.", ImportError):
        from diffusers import AutoencoderKL
    with explained(
        lambda reason: (
            f"The autoencoder {name} cannot be read ({reason}): set it to a folder that diffusers wrote, or a name on"
            " the Hugging Face hub."
        )
    ):
        autoencoder = AutoencoderKL.from_pretrained(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return autoencoder.to(device).eval(), device


@torch.no_grad()
def decoded(values: Tensor, name: str) -> Tensor:
    """Decodes latents to pixels in 0..1, float (batch, 3, height, width)."""
    autoencoder, device = open_autoencoder(name)
    images = [autoencoder.decode(chunk.to(device)).sample for chunk in values.split(8)]
    return ((torch.cat(images) + 1) / 2).clamp(0, 1)
