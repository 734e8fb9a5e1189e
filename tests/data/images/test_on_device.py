import random
from collections import Counter

import numpy as np
import pytest
import torch
from imagenet_folder import write_imagenet
from PIL import Image
from tiers import slow
from timm.data import auto_augment as timms
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torchvision.transforms.functional import pil_to_tensor

from linvit.data.images import ImageFolder
from linvit.data.images.augmentation_steps import Drawn, Noted, Notes
from linvit.data.images.on_device import blended, cropped, leveled, moved
from linvit.data.images.small import Cifar
from linvit.data.order import Augmented

SIZES = [(32, 33), (37, 31), (3, 5)]
LEVELED = {
    timms.auto_contrast: [()],
    timms.equalize: [()],
    timms.invert: [()],
    timms.posterize: [(1,), (3,), (8,)],
    timms.solarize: [(0,), (100,), (256,)],
    timms.solarize_add: [(0,), (61,), (128,)],
    timms.brightness: [(0.1,), (0.73,), (1.9,)],
    timms.contrast: [(0.1,), (0.73,), (1.0,), (1.9,)],
}
BLENDED = {
    timms.color: [(0.1,), (0.73,), (1.0,), (1.9,)],
    timms.sharpness: [(0.1,), (0.73,), (1.9,)],
}
MOVED = {
    timms.shear_x: [(-0.27,), (0.3,)],
    timms.shear_y: [(-0.27,), (0.3,)],
    timms.translate_x_rel: [(-0.31,), (0.45,)],
    timms.translate_y_rel: [(-0.31,), (0.45,)],
    timms.translate_x_abs: [(7.0,), (0.0,)],
    timms.translate_y_abs: [(-7.0,)],
    timms.rotate: [(0.0,), (-17.3,), (30.0,)],
}
FILL = (124, 116, 104)


def pictures(channels=3):
    """Smooth and noisy ones, with few and many levels, also a plain one."""
    generator = np.random.default_rng(0)
    for height, width in SIZES:
        noise = generator.integers(0, 256, (height, width, channels))
        ramp = np.linspace(20, 180, height * width * channels).reshape(height, width, channels)
        for pixels in (noise, ramp + noise / 8, np.where(noise > 99, 90, 40), np.full_like(noise, 77)):
            yield Image.fromarray(pixels.astype(np.uint8) if channels == 3 else pixels.astype(np.uint8)[..., 0])


def both(function, arguments, channels=3, resample=Image.Resampling.BICUBIC):
    """An image by timm's function, and by ours."""
    for picture in pictures(channels):
        options = {"resample": resample, "fillcolor": FILL[:channels]}
        expected = pil_to_tensor(function(picture, *arguments, **options))
        notes = Noted(function)(Notes(channels, *picture.size[::-1]), *arguments, **options)
        step = torch.tensor(notes.steps, dtype=torch.float64)
        pixels, kind, argument = pil_to_tensor(picture)[None], step[:, 0].long(), step[:, 1]
        pixels = blended(leveled(pixels, kind, argument), kind, argument)
        fill = torch.tensor(FILL[:channels], dtype=torch.float32)[:, None, None]
        yield expected, moved(pixels, kind, step[:, 2:8], step[:, 8] > 0, fill)[0]


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("function", [*LEVELED, *BLENDED], ids=lambda function: function.__name__)
def test_levels_and_blends_are_pillows(function, channels):
    for arguments in (LEVELED | BLENDED)[function]:
        for expected, got in both(function, arguments, channels):
            assert torch.equal(expected, got)


@pytest.mark.parametrize("resample", [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR], ids=["bicubic", "bilinear"])
@pytest.mark.parametrize("function", MOVED, ids=lambda function: function.__name__)
def test_moved_pixels_are_pillows_up_to_a_level(function, resample):
    pairs = [pair for arguments in MOVED[function] for pair in both(function, arguments, resample=resample)]
    off = torch.cat([(expected.int() - got.int()).abs().flatten() for expected, got in pairs])
    assert off.max() <= 1
    assert off.float().mean() < 0.02  # Pillow cuts whole numbers off that are a rounding error too small


@pytest.mark.parametrize("resample", [Image.Resampling.BICUBIC, Image.Resampling.BILINEAR], ids=["bicubic", "bilinear"])
@pytest.mark.parametrize("box", [(0, 0, 33, 32), (3, 5, 21, 25), (10, 2, 11, 9), (0, 0, 1, 1), (7, 4, 30, 5)])
@pytest.mark.parametrize("size", [(32, 32), (17, 40)])
def test_crops_are_pillows_up_to_the_rounding_between_its_two_passes(size, box, resample):
    left, top, right, bottom = box
    for number, picture in enumerate(list(pictures())[:4]):
        crop = torch.tensor([[top, left, bottom - top, right - left, resample == Image.Resampling.BILINEAR]])
        got = cropped(pil_to_tensor(picture)[None], crop, size)[0]
        expected = pil_to_tensor(picture.crop(box).resize(size[::-1], resample))
        off = (expected.int() - got.int()).abs()
        assert off.max() <= (25 if number % 2 == 0 and resample == Image.Resampling.BICUBIC else 1)  # noise is clamped
        assert off.float().mean() < 0.8


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data"), train=6, val=(1, 1, 1))


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cifar")
    generator = np.random.default_rng(0)
    (folder / "batches.meta.txt").write_text("\n".join(map(str, range(10))))
    smooth = generator.integers(0, 256, (100, 3, 4, 4)).repeat(8, 2).repeat(8, 3).reshape(100, -1)
    records = np.concatenate([np.arange(100)[:, None] % 10, smooth], 1).astype(np.uint8)
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        records.tofile(folder / name)
    return folder


def batches(make, count, **options):
    """Images of one epoch augmented on the CPU, one by one, and on their device, in one batch."""
    found = []
    for where in ("cpu", "device"):
        source = make(augment_on=where, num_workers=0, seed=3, **options)
        images = Augmented(source.train_set(), source.seed)
        batch = default_collate([images[0, index] for index in range(count)])
        found.append(source.on_after_batch_transfer(batch, 0))
    return found


POLICIES = ["rand-m9-mstd0.5-inc1", "rand-m9-n3-mstd101-p0.9", *slow("v0-mstd0.5", "originalr", None)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("interpolation", ["bicubic", "random"])
def test_the_images_are_those_of_the_cpu(root, policy, interpolation):
    options = {"auto_augment": policy, "train_interpolation": interpolation, "random_erasing": 0.0, "size": (32, 48)}
    one, other = batches(lambda **o: ImageFolder(str(root), **o), 12, **options)
    assert torch.equal(one[1], other[1])
    assert other[0].dtype == torch.float32
    assert other[0].shape == (12, 3, 32, 48)
    level = 1 / 255 / 0.224
    off = (one[0] - other[0]).abs()
    assert (off > 1.1 * level).float().mean() < 0.005  # a threshold lies between two neighbouring levels
    assert off.mean() < 0.1 * level
    assert off.flatten(1).amax(1).lt(1e-5).float().mean() > 0.3  # nothing moved


@pytest.mark.parametrize("channels", [3, 1])
def test_small_images_are_cropped_on_the_device_too(cifar, channels):
    def make(**options):
        return Cifar(str(cifar), channels=channels, **options)

    drawn = Augmented(make(augment_on="device").train_set(), 0)[0, 5][0]
    assert drawn.pixels.shape == (channels, 32, 32)
    assert drawn.crop.shape == (5,)
    one, other = batches(make, 60, random_erasing=0.0)
    assert (one[0] - other[0]).abs().mean() < 0.5 / 255 / 0.25


def test_erased_pixels_are_noise_in_the_same_places(root):
    def make(**options):
        return ImageFolder(str(root), **options)

    plain, erased = (batches(make, 12, auto_augment=None, random_erasing=share, color_jitter=0.0) for share in (0, 1))
    places = [(one != other).any(1) for (one, _), (other, _) in zip(plain, erased, strict=True)]
    assert torch.equal(*places)
    assert 0.02 < places[0].float().mean() < 1 / 3
    for images, _ in erased:
        noise = images.movedim(1, -1)[places[0]]
        assert noise.mean().abs() < 0.02
        assert noise.std() == pytest.approx(1, abs=0.02)
    assert not torch.equal(erased[0][0], erased[1][0])


def test_equal_positions_have_equal_images_whatever_was_drawn_before(root):
    source = ImageFolder(str(root), size=32, augment_on="device", random_erasing=1.0, num_workers=0, seed=3)
    images = Augmented(source.train_set(), source.seed)
    made = []
    for epoch, before in ((0, 1), (0, 2), (1, 1)):
        batch = default_collate([images[epoch, index] for index in range(6)])
        random.seed(before), np.random.seed(before), torch.manual_seed(before)
        made.append(source.on_after_batch_transfer(batch, 0)[0])
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returned = [result.alias_info for result in function._schema.returns]
        self.calls[function] += not any(alias and not alias.is_write for alias in returned)  # no view
        return function(*args, **(kwargs or {}))


def test_the_number_of_operators_does_not_depend_on_that_of_images(cifar):
    source = Cifar(str(cifar), augment_on="device", num_workers=0)
    images = Augmented(source.train_set(), 0)
    counts = []
    for number in (2, 32):
        batch = default_collate([images[0, index] for index in range(number)])
        assert isinstance(batch[0], Drawn)
        with Operators() as operators:
            source.on_after_batch_transfer(batch, 0)
        counts.append(operators.calls)
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) < 550  # two steps, a crop


def test_validation_and_other_batches_stay_as_they_are(root):
    source = ImageFolder(str(root), size=32, augment_on="device", num_workers=0)
    batch = next(iter(source.val_dataloader()))
    assert source.on_after_batch_transfer(batch, 0) is batch


@pytest.mark.parametrize("policy", ["augmix-m5", "3a", "rand-t3a", "rand-t3aw-m5"])
def test_policies_that_the_device_does_not_have(root, policy):
    ImageFolder(str(root), auto_augment=policy)
    with pytest.raises(ValueError, match=r"^`augment_on` is 'device', where images are neither blurred"):
        ImageFolder(str(root), auto_augment=policy, augment_on="device")


def test_interpolations_that_the_device_does_not_have(root):
    with pytest.raises(ValueError, match=r"^`augment_on` is 'device', where training images are not resized by 'box'"):
        ImageFolder(str(root), interpolation="box", augment_on="device")
    ImageFolder(str(root), interpolation="box", train_interpolation="random", augment_on="device")
