"""Weights that come with linvit: found by timm's tag, adapted as timm does it, described as they were trained."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from stand_in_weights import write_black_cifar10, write_stand_ins
from torch.testing import assert_close

from linvit.data.images.image import Preprocessing
from linvit.data.images.small import Cifar
from linvit.models.by_name import bundled_names, bundled_weights, check_model
from linvit.models.family import CIFAR10
from linvit.runs.recipe import Recipe
from linvit.runs.recipe_values import read_recipe

ROOT = Path(__file__).parents[2]
NAMES = ["care_nano.cifar10", "mavit_nano.cifar10", "ravlt_nano.cifar10"]


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    return write_stand_ins(tmp_path, monkeypatch)


def preprocessing(name):
    cfg = timm.get_pretrained_cfg(name)
    return Preprocessing(cfg.input_size[1:], cfg.mean, cfg.std, cfg.interpolation, cfg.crop_pct)


def test_the_tag_alone_asks_for_weights(stand_ins):
    assert bundled_names() == NAMES
    bundled_weights(NAMES[0]).unlink()
    assert bundled_names() == NAMES[1:], "a file that is missing is not listed"
    assert set(NAMES) <= set(timm.list_pretrained("*nano*"))
    for name in NAMES:
        untagged = name.removesuffix(".cifar10")
        assert bundled_weights(name).name == f"{name}.safetensors"
        assert bundled_weights(untagged) is None
        assert timm.create_model(untagged, device="meta").num_classes == 1000
        with pytest.raises(RuntimeError, match=rf"^{untagged} has weights under another name: create {name}\.$"):
            timm.create_model(untagged, pretrained=True)
    assert bundled_weights("ravlt_tiny") is bundled_weights("ravlt_tiny.in1k") is None


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_in_the_file_single_in_the_network(stand_ins, name):
    network = timm.create_model(name, pretrained=True).eval()
    before = stand_ins[name].state_dict()
    for key, value in network.state_dict().items():
        assert value.dtype == before[key].dtype
        assert_close(value, before[key], rtol=2**-11, atol=2**-25)  # half a unit in the last place of float16
    with torch.no_grad():
        for parameter in stand_ins[name].parameters():
            parameter.copy_(parameter.half())
        images = torch.randn(2, 3, 32, 64)
        assert_close(network(images), stand_ins[name](images), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_other_channels_classes_and_feature_maps(stand_ins, name):
    whole = timm.create_model(name, pretrained=True).eval()
    other = timm.create_model(name, pretrained=True, in_chans=1, num_classes=7).eval()
    body = timm.create_model(name, pretrained=True, features_only=True).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert other(images[:, :1]).shape == (2, 7)
        for one, two in zip(body(images), whole.forward_intermediates(images, intermediates_only=True), strict=True):
            assert_close(one, two)
    assert_close(other.state_dict()["stem.0.weight"], whole.state_dict()["stem.0.weight"].sum(1, keepdim=True))


def test_a_missing_or_damaged_file_ends_in_one_sentence(stand_ins):
    path = bundled_weights("mavit_nano.cifar10")
    path.write_bytes(path.read_bytes()[:1000])
    sentence = r"^mavit_nano: the weights .*mavit_nano.cifar10.safetensors are missing or damaged: use"
    with pytest.raises(ValueError, match=sentence):
        timm.create_model("mavit_nano.cifar10", pretrained=True)
    path.unlink()
    with pytest.raises(ValueError, match=sentence):
        timm.create_model("mavit_nano.cifar10", pretrained=True)


def test_an_unknown_tag_is_refused():
    check_model("mavit_nano.untrained")
    for tag in ("cifar100", ""):
        with pytest.raises(
            ValueError, match=f"^Unknown tag '{tag}' of the model 'mavit_nano': choose mavit_nano.cifar"
        ):
            check_model(f"mavit_nano.{tag}")


@pytest.mark.parametrize("name", NAMES)
def test_the_configuration_is_that_of_the_recipe(name, tmp_path):
    values = Recipe(read_recipe(ROOT / "recipes" / "weights" / f"{name.replace('.', '_')}.yaml")).resolved()
    assert values["model"] == {"name": name.removesuffix(".cifar10")}
    write_black_cifar10(tmp_path)
    data = {key: value for key, value in values["data"].items() if key not in ("name", "root")}
    source = Cifar(str(tmp_path), **data)
    assert source.preprocessing == preprocessing(name)
    assert timm.get_pretrained_cfg(name).label_names == tuple(source.class_names)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_in_the_package_says_where_it_comes_from(name):
    path = bundled_weights(name)
    if not path.is_file():
        pytest.skip(f"{path.name} is not in this copy: its network is not trained yet")
    assert path.stat().st_size < 4e6 / len(NAMES)
    with safe_open(path, "pt") as file:
        about = {key: value for key, value in file.metadata().items() if key not in ("format", "commit", "license")}
    about = {key: json.loads(value) for key, value in about.items()}
    assert about["model"]["name"] == name.removesuffix(".cifar10")
    assert tuple(about["class_names"]) == CIFAR10
    given = {"resize": "crop", **about["preprocessing"]}  # the files are older than this field
    assert given == json.loads(json.dumps(asdict(preprocessing(name))))
    assert (about["trained_on"], about["measures"]["images"]) == (50_000, 10_000)
    card = path.with_suffix(".md").read_text()
    assert f"| top-1, held out | {100 * about['measures']['top1']:.2f} % |" in card
    assert "license: apache-2.0" in card
    assert timm.create_model(name, pretrained=True).num_classes == 10
