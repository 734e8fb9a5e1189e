import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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


NUMBERS = st.one_of(st.integers(0, 12).map(str), st.floats(0, 3).map(lambda value: f"{value:.2f}"))
SECTIONS = st.tuples(st.sampled_from(["m", "n", "p", "w", "d", "a", "b", "mstd", "mmax", "inc", "t", "x", ""]), NUMBERS)
STARTS = ["rand", "augmix", "original", "originalr", "v0", "v0r", "3a", "random", "", "RAND"]


@settings(derandomize=True, deadline=None, database=None)
@given(st.sampled_from(STARTS), st.lists(SECTIONS, max_size=3))
def test_a_policy_is_refused_in_a_sentence_or_known_to_timm_in_full(root, start, sections):
    name = "-".join([start, *(key + value for key, value in sections)])
    try:
        source(root, auto_augment=name).train_transform()
    except ValueError as error:
        assert str(error).startswith("`auto_augment` is ")  # noqa: PT017
        assert "\n" not in str(error)  # noqa: PT017
        return
    known = {"rand": "mnp mstd mmax inc", "augmix": "mwdab mstd"}.get(start, "mstd")
    assert all(key in known and key for key, _ in sections)


@pytest.mark.parametrize(
    "policy",
    ["rand-foo", "rand-mstdx", "3a-mstd", "v0-foo", 7],
)
def test_what_timm_would_ignore_or_choke_on_is_refused(root, policy):
    with pytest.raises(
        ValueError, match=r"^`auto_augment` is .*, expected a policy of timm, such as rand-m9-mstd0.5-inc1,"
    ):
        source(root, auto_augment=policy)


@pytest.mark.parametrize(
    "policy", ["rand-tweights-n9", "rand-mmax30-m30-inc1", "rand-mstd101", "augmix-d3-b1-a2.5", "v0r-mstd1"]
)
def test_every_part_of_timms_notation_is_taken(root, policy):
    assert source(root, auto_augment=policy).train_transform()(Image.new("RGB", (40, 50))).shape == (3, 32, 32)


def test_training_and_validation_interpolate_as_told(root):
    assert "bilinear bicubic" in str(source(root, train_interpolation="random").train_transform())
    assert "bilinear bicubic" not in str(source(root, interpolation="bicubic").train_transform())
    assert "bicubic" in str(source(root, train_interpolation="random").preprocessing.transform())
