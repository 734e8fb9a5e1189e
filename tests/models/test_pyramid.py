import pytest
import timm
import torch
from golden_networks import golden, released_keys, released_state_dict
from test_all_models import create, image, visible
from torch.testing import assert_close

import linvit


@pytest.fixture(scope="module")
def released():
    return {key: value.float() for key, value in released_state_dict(golden("RAVLT_T")).items()}


@pytest.fixture(scope="module")
def ravlt():
    return timm.create_model("ravlt_tiny")


@pytest.mark.parametrize(
    ("released_name", "name"),
    [(f"{family}_{size[0].upper()}", f"{ours}_{size}") for family, ours in (("RAVLT", "ravlt"), ("MALA", "mavit"))
     for size in ("tiny", "small", "base", "large")],
)  # fmt: skip
def test_every_released_key_has_its_place(released_name, name):
    model = timm.create_model(name, device="meta")
    keys = released_keys(golden(released_name))
    rest = {key: torch.empty(shape, device="meta") for key, shape, _ in keys if "angle" not in key}
    native = model.native_state_dict(rest)
    assert {key: value.shape for key, value in native.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_filter_is_idempotent(ravlt, released):
    native = ravlt.native_state_dict(released)
    again = ravlt.native_state_dict(native)
    assert again.keys() == native.keys() == ravlt.state_dict().keys()
    assert all(again[key] is native[key] for key in native)


def test_filter_does_not_depend_on_order(ravlt, released):
    native = ravlt.native_state_dict(released)
    for order in (sorted, lambda keys: sorted(keys, reverse=True)):
        other = ravlt.native_state_dict({key: released[key] for key in order(released)})
        assert other.keys() == native.keys()
        assert all(torch.equal(other[key], native[key]) for key in native)


def test_filter_accepts_a_checkpoint_without_head(ravlt, released):
    headless = {key: value for key, value in released.items() if not key.startswith("head.")}
    assert ravlt.state_dict().keys() - ravlt.native_state_dict(headless).keys() == {
        "head.fc.weight",
        "head.fc.bias",
    }


def test_released_file_through_timm(released, tmp_path):
    torch.save({"model": released}, tmp_path / "RAVLT_T.pth")
    overlay = {"file": str(tmp_path / "RAVLT_T.pth")}
    model = timm.create_model("ravlt_tiny", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    expected = linvit.load_released(timm.create_model("ravlt_tiny"), released).eval()
    x = image(64, 96)
    assert_close(model(x), expected(x), rtol=0, atol=0)
    extractor = timm.create_model(
        "ravlt_tiny", pretrained=True, pretrained_cfg_overlay=overlay, features_only=True, out_indices=(0, 2)
    ).eval()
    for feature, other in zip(
        extractor(x), expected.forward_intermediates(x, [0, 2], intermediates_only=True), strict=True
    ):
        assert_close(feature, other)


def test_published_weights_are_named():
    for name, hub, file in (
        ("ravlt_tiny", "aldjalkdf/RAVLT", "RAVLT_T.pth"),
        ("ravlt_large", "aldjalkdf/RAVLT", "RAVLT_L.pth"),
        ("mavit_base", "aldjalkdf/MAViT", "MAViT_B.pth"),
    ):
        cfg = timm.get_pretrained_cfg(name)
        assert (cfg.hf_hub_id, cfg.hf_hub_filename, cfg.tag) == (hub, file, "in1k")
    assert not timm.get_pretrained_cfg("ravlt_tiny_linear").has_weights


def test_stochastic_depth_rises_to_the_released_rate():
    model = timm.create_model("ravlt_base", device="meta")
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for stage in model.stages for block in stage.blocks]
    assert rates == pytest.approx([0.4 * i / 27 for i in range(28)])


def test_layer_scales_start_as_released():
    model = timm.create_model("mavit_base")
    assert [stage.blocks[0].gamma_1.mean().item() for stage in model.stages] == pytest.approx([1, 1, 1e-6, 1e-6])


def test_concatenating_pool_doubles_what_the_classifier_reads():
    model, x = visible(create("ravlt_nano", global_pool="catavgmax", num_classes=3)), image(64, 64)
    assert model(x).shape == (2, 3)
    assert model.head_hidden_size == 2 * model.num_features
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape[1] == model.head_hidden_size


def test_without_pooling_the_classifier_reads_every_position():
    model, x = visible(create("mavit_nano", num_classes=3)), image(64, 96)
    weights, logits = model.state_dict(), model(x)
    model.reset_classifier(3, "")
    model.load_state_dict(weights)
    assert model(x).shape == (2, 3, 2, 3)
    assert_close(model(x).mean((2, 3)), logits)


def test_final_convolution_goes_with_the_norm():
    model, x = visible(create("mavit_nano")), image(64, 64)
    tap = model.forward_intermediates(x, [3], intermediates_only=True)[0]
    model.prune_intermediate_layers([3], prune_norm=True)
    assert_close(model.forward_features(x), tap)
    assert model.num_features == tap.shape[1]
