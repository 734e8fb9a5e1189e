"""`pretrained=True` with the authors' weights: a hub that is away, a faked one, files that are adapted or refused."""

from functools import cache

import pytest
import timm
import torch
from golden_networks import NAMES, golden, released_state_dict
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from torch.testing import assert_close

import linvit
from linvit.models.pretrained import require_fit

RELEASED = ["RAVLT_T", "MALA_T", "CARETrans_S0"]
HUBS = {"ravlt": "aldjalkdf/RAVLT", "mavit": "aldjalkdf/MAViT"}


@cache
def released(released_name):
    return {key: value.float() for key, value in released_state_dict(golden(released_name)).items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The released layout, wrapped as the authors save it, one file a family."""
    folder = tmp_path_factory.mktemp("released")
    for name in RELEASED:
        torch.save({"model": released(name)}, folder / f"{name}.pth")
    return {name: folder / f"{name}.pth" for name in RELEASED}


@pytest.fixture
def hub(monkeypatch):
    """A hub that holds the files put into the dictionary and counts what it is asked for."""
    held, asked = {}, []

    def download(repo_id, filename, **kwargs):
        asked.append((repo_id, filename))
        if held.get(filename) is None:
            raise EntryNotFoundError(filename) if held else LocalEntryNotFoundError("First.\nSecond. Third.")
        return str(held[filename])

    monkeypatch.setattr("timm.models._hub.hf_hub_download", download)
    return held, asked


def test_nothing_is_downloaded_unasked(hub):
    for name in ("ravlt_tiny", "mavit_tiny", "care_s0"):
        timm.create_model(name, device="meta")
    assert hub[1] == []


@pytest.mark.parametrize("name", ["ravlt_tiny", "ravlt_large", "mavit_small"])
def test_without_network_one_sentence_says_what_to_fetch(hub, name):
    with pytest.raises(RuntimeError) as caught:
        timm.create_model(name, pretrained=True)
    file = timm.get_pretrained_cfg(name).hf_hub_filename
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert ". " not in message
    for word in (name, file, HUBS[name.split("_")[0]], "linvit.load_released", "linvit convert", "checkpoint_path"):
        assert word in message


@pytest.mark.parametrize(("name", "advice"), [("care_s0", "load_released"), ("ravlt_tiny_linear", "linearize")])
def test_no_published_weights(hub, name, advice):
    with pytest.raises(RuntimeError, match=rf"^{name} has no published weights on a hub: .*linvit\.{advice}"):
        timm.create_model(name, pretrained=True)
    assert hub[1] == []


@pytest.mark.parametrize("released_name", ["RAVLT_T", "MALA_T"])
def test_weights_from_the_hub(hub, files, released_name):
    name = NAMES[released_name]
    file = timm.get_pretrained_cfg(name).hf_hub_filename
    hub[0][file] = files[released_name]
    model = timm.create_model(name, pretrained=True)
    assert (HUBS[name.split("_")[0]], file) in hub[1]
    expected = linvit.load_released(timm.create_model(name), released(released_name)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


def test_damaged_weights_from_the_hub(hub, tmp_path):
    state = dict(released("RAVLT_T"))
    del state["layers.1.blocks.0.pos.weight"]
    torch.save(state, tmp_path / "part.pth")
    hub[0]["RAVLT_T.pth"] = tmp_path / "part.pth"
    for kwargs in ({}, {"num_classes": 7}, {"features_only": True}):
        with pytest.raises(ValueError, match=r"in 1 keys.*\n  missing stages\.1\.blocks\.0\.cpe\.weight"):
            timm.create_model("ravlt_tiny", pretrained=True, **kwargs)


@pytest.mark.parametrize("released_name", RELEASED)
def test_a_released_file_adapts_to_channels_and_classes(files, released_name):
    name, overlay = NAMES[released_name], {"file": str(files[released_name])}
    expected = linvit.load_released(timm.create_model(name), released(released_name)).eval()
    same = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert_close(same(x), expected(x), rtol=0, atol=0)
    other = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, in_chans=1, num_classes=7)
    assert other.eval()(x[:, :1]).shape == (2, 7)
    own, theirs = other.state_dict(), expected.state_dict()
    first, classifier = other.pretrained_cfg["first_conv"], other.pretrained_cfg["classifier"]
    heads = (classifier,) if isinstance(classifier, str) else classifier
    assert_close(own.pop(f"{first}.weight"), theirs[f"{first}.weight"].sum(1, keepdim=True))
    rest = {key for key in own if not key.startswith(tuple(f"{head}." for head in heads))}
    assert len(rest) == len(own) - 2 * len(heads)
    assert all(torch.equal(own[key], theirs[key]) for key in rest)


def test_features_from_a_headless_file(files, tmp_path):
    state = {key: value for key, value in released("RAVLT_T").items() if not key.startswith("head.")}
    torch.save(state, tmp_path / "headless.pth")
    overlay = {"file": str(tmp_path / "headless.pth")}
    body = timm.create_model("ravlt_tiny", pretrained=True, pretrained_cfg_overlay=overlay, features_only=True)
    whole = timm.create_model("ravlt_tiny", pretrained=True, pretrained_cfg_overlay={"file": str(files["RAVLT_T"])})
    x = torch.randn(1, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        expected = whole.eval().double().forward_intermediates(x, intermediates_only=True)
        for one, other in zip(body.eval().double()(x), expected, strict=True):
            assert_close(one, other)


def test_a_missing_file_of_the_user_is_named(hub, tmp_path):
    overlay = {"file": str(tmp_path / "absent.pth")}
    with pytest.raises(ValueError, match=r"^ravlt_tiny: the weights .*absent\.pth are missing or damaged"):
        timm.create_model("ravlt_tiny", pretrained=True, pretrained_cfg_overlay=overlay)


def test_require_fit_leaves_adapted_modules_out():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    weights = model.state_dict()
    weights.pop("1.num_batches_tracked")
    require_fit(weights, model, "test")
    weights["0.weight"] = torch.zeros(5, 2)
    require_fit(weights, model, "test", ("0",))
    with pytest.raises(ValueError, match=r"^test: .*Sequential in 1 keys"):
        require_fit(weights, model, "test")


@pytest.mark.parametrize("indices", [0, 99, (3, 1), (1, 1), (1, -3), (1, 99)])
def test_out_indices_that_feature_info_would_misname_are_refused(indices):
    with pytest.raises(ValueError, match="`out_indices` is"):
        timm.create_model("care_nano", features_only=True, out_indices=indices)


def test_without_a_network_nothing_is_tried_again(monkeypatch, tmp_path):
    def unknown(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr("linvit.models.pretrained.getproxies", dict)
    monkeypatch.setattr("linvit.models.pretrained.socket.getaddrinfo", unknown)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    seen = []
    monkeypatch.setattr(
        "linvit.models.pretrained.build_model_with_cfg",
        lambda *_, **__: seen.append(constants.HF_HUB_OFFLINE) or unknown(),
    )
    with pytest.raises(RuntimeError, match=r"RAVLT_T\.pth could not be downloaded"):
        timm.create_model("ravlt_tiny", pretrained=True)
    assert seen == [True]
    assert constants.HF_HUB_OFFLINE is False
