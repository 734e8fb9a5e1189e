import numpy as np
import pytest
from imagenet_folder import write_imagenet
from PIL import Image

from linvit.data.images import ImageFolder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_imagenet(tmp_path_factory.mktemp("data"), train=1, val=(1, 1, 1))


def source(root, **options):
    return ImageFolder(str(root), size=32, num_workers=0, **options)


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "v0"])
def test_every_strength_of_posterizing_gives_a_picture(root, policy):
    picture = Image.fromarray(np.full((8, 8, 3), 255, np.uint8))
    augment = source(root, auto_augment=policy).train_transform().transforms
    ops = [op for step in augment for op in getattr(step, "ops", ())]
    ops += [op for step in augment for policy in getattr(step, "policy", ()) for op in policy]
    posterizing = [op for op in ops if op.name.startswith("Posterize")]
    assert posterizing
    for op in posterizing:
        assert np.asarray(op.aug_fn(picture, 0)).max() == 0
        assert np.asarray(op.aug_fn(picture, 1)).min() == 128
        assert np.asarray(op.aug_fn(picture, 8)).min() == 255


def test_training_and_validation_interpolate_as_told(root):
    assert "bilinear bicubic" in str(source(root, train_interpolation="random").train_transform())
    assert "bilinear bicubic" not in str(source(root, interpolation="bicubic").train_transform())
    assert "bicubic" in str(source(root, train_interpolation="random").preprocessing.transform())


def test_options_of_a_source_are_documented():
    import inspect

    from linvit.data.images.augmented import AugmentedSource

    for name in set(inspect.signature(AugmentedSource).parameters) - {"channels", "batch_size", "seed", "num_workers"}:
        assert name in AugmentedSource.__doc__, name
