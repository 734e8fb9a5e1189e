from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import timm
import torch
from tiny_run import ONE_STEP, content, write_recipe
from trained import trained_run

from linvit.data.images.image import Preprocessing
from linvit.runs.evaluate import check_size, check_teacher
from linvit.tasks.initialization import initialize
from linvit_cli import main

VIT = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}


def vit(size, **arguments):
    return timm.create_model("deit_tiny_patch16_224", img_size=size, **VIT, **arguments)


def source(names=("a", "b"), mean=(0.5,) * 3, size=(32, 32)):
    return SimpleNamespace(class_names=list(names), preprocessing=Preprocessing(size, mean, (0.25,) * 3))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"names": ("b", "a")}, "predicts the classes a, b, but the data has b, a"),
        ({"mean": (0.1, 0.5, 0.5)}, r"`mean` is \[0.1, 0.5, 0.5\], but the teacher"),
        ({}, None),
    ],
)
def test_a_teacher_of_other_classes_or_another_normalization_is_refused(given, words, tmp_path):
    path = tmp_path / "teacher.ckpt"
    about = {"class_names": ["a", "b"], "preprocessing": {"mean": (0.5,) * 3, "std": (0.25,) * 3}}
    torch.save({"linvit": about}, path)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        check_teacher(str(path), source(**given))


def test_images_of_another_size_than_the_network_takes_are_refused():
    with pytest.raises(ValueError, match="`size` is 48×48 px, but the teacher takes 32×32"):
        check_size(vit(32), source(size=(48, 48)), "teacher")
    check_size(vit(32, dynamic_img_size=True), source(size=(48, 48)), "network")
    check_size(timm.create_model("mavit_nano"), source(size=(48, 48)), "network")


def test_weights_start_a_network_of_another_image_size(tmp_path):
    path = tmp_path / "weights.pth"
    small = vit(32)
    torch.save(small.state_dict(), path)
    large = vit(48)
    initialize(large, path)
    assert large.pos_embed.shape == (1, 37, 32)
    assert torch.equal(large.pos_embed[:, 0], small.pos_embed[:, 0])


@pytest.mark.parametrize("same", [True, False])
def test_a_classifier_of_other_classes_is_not_said_to_fit(same, tmp_path, tmp_path_factory, capsys):
    start = content(trained_run(tmp_path_factory, trainer=ONE_STEP))
    if not same:
        start["linvit"]["class_names"].reverse()
    torch.save(start, tmp_path / "start.ckpt")
    recipe = write_recipe(tmp_path, trainer=ONE_STEP)
    capsys.readouterr()
    assert main(["train", str(recipe), f"init={tmp_path / 'start.ckpt'}"]) == 0
    said = "".join(capsys.readouterr())
    assert ("start.ckpt, classifier included." in said) is same
    assert ("start.ckpt without its classifier" in said) is not same
