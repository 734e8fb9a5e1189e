"""What users of timm expect of a model, beyond what timm's own suite asks of every model."""

import json

import pytest
import timm
import torch
from test_all_models import NANOS, create, image, visible
from timm.models import save_for_hf
from timm.models._manipulate import group_parameters
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch.testing import assert_close


@pytest.fixture(params=NANOS)
def name(request):
    return request.param


@pytest.mark.parametrize("feature_cls", ["list", "dict", "hook", "fx", "getter"])
def test_features_only(name, feature_cls):
    model, x = visible(create(name)), image(64, 96)
    expected = model.forward_intermediates(x, indices=[1, 3], intermediates_only=True)
    extractor = timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay={"state_dict": model.state_dict()},
        features_only=True,
        out_indices=(1, 3),
        feature_cls=feature_cls,
    ).eval()
    features = extractor(x)
    features = list(features.values()) if isinstance(features, dict) else features
    for feature, other in zip(features, expected, strict=True):
        assert_close(feature, other)


def test_initialises_after_meta(name):
    model = timm.create_model(name, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    model.init_weights()
    reference = create(name)
    for (key, ours), theirs in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        drawn = theirs.ndim > 1 and not key.endswith(("gamma_1", "gamma_2"))
        assert ours.isfinite().all(), key
        assert drawn or torch.equal(ours, theirs), key
        assert not drawn or ours.abs().max() <= 2, key


def test_reset_classifier(name):
    model, x = create(name), image(64, 64)
    frozen = {key: parameter.clone() for key, parameter in model.named_parameters() if "fc" not in key.split(".")}
    model.reset_classifier(7)
    assert model.num_classes == 7
    assert model(x).shape == (2, 7)
    model.reset_classifier(0)
    assert_close(model(x), model.forward_head(model.forward_features(x), pre_logits=True))
    assert model(x).shape == (2, model.head_hidden_size)
    model.reset_classifier(0, "")
    assert model(x).shape == (2, model.num_features, 2, 2)
    assert all(torch.equal(parameter, frozen[key]) for key, parameter in model.named_parameters() if key in frozen)


def test_reset_classifier_thaws_nothing(name):
    model = create(name).requires_grad_(False)
    model.reset_classifier(7)
    classifiers = model.get_classifier()
    fresh = [
        f"{key}.{part}"
        for key, module in model.named_modules()
        for part in ("weight", "bias")
        if module in (classifiers if isinstance(classifiers, tuple) else (classifiers,))
    ]
    assert fresh
    assert [key for key, parameter in model.named_parameters() if parameter.requires_grad] == fresh


def test_channels_classes_and_pooling(name):
    x = torch.randn(2, 5, 32, 64)
    for pool in ("avg",) if name.startswith("care") else ("avg", "catavgmax"):
        model = create(name, in_chans=5, num_classes=7, global_pool=pool)
        assert (model.in_chans, model.num_classes) == (5, 7)
        assert model(x).shape == (2, 7)
        assert create(name, in_chans=5, num_classes=0, global_pool=pool)(x).shape == (2, model.head_hidden_size)
    unpooled = create(name, in_chans=5, num_classes=0, global_pool="")
    assert unpooled(x).shape == (2, unpooled.head_hidden_size, 1, 2)
    assert create(name, in_chans=5, num_classes=7, global_pool="")(x).shape == (2, 7, 1, 2)


def test_everything_is_made_on_the_device_asked_for(name):
    model = timm.create_model(name, device="meta", dtype=torch.float64)
    tensors = (*model.parameters(), *model.buffers())
    assert all(tensor.is_meta for tensor in tensors)
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}


def test_pruned_head_can_be_replaced(name):
    model, x = visible(create(name)), image(64, 64)
    tap = model.forward_intermediates(x, indices=[2], intermediates_only=True)[0]
    model.prune_intermediate_layers([2])
    assert_close(model.forward_features(x), tap)
    model.reset_classifier(7, "avg")
    assert model(x).shape == (2, 7)
    assert model.head_hidden_size == model.num_features == tap.shape[1]


def test_stop_early_ends_at_the_last_tap(name):
    model, x = visible(create(name)), image(64, 64)
    final, taps = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert_close(final, taps[0])
    final, _ = model.forward_intermediates(x, indices=[3], stop_early=True)
    assert_close(final, model.forward_features(x))


def test_other_output_format_is_refused(name):
    with pytest.raises(ValueError, match="`output_fmt` is 'NHWC', expected 'NCHW'"):
        create(name).forward_intermediates(image(64, 64), output_fmt="NHWC")


@pytest.mark.parametrize("coarse", [False, True])
def test_groups_follow_the_depth(name, coarse):
    model = create(name)
    groups = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    first = [groups[key] for key in ("stem.0.weight", "stages.0.blocks.0.drop", "head.fc.weight") if key in groups]
    assert first == sorted(first)
    blocks = sum(len(stage.blocks) for stage in model.stages)
    assert len(set(groups.values())) == (4 if coarse else blocks) + 2


def test_layer_decay_rises_towards_the_head(name):
    model = create(name)
    groups = create_optimizer_v2(model, "adamw", lr=1.0, weight_decay=0.05, layer_decay=0.7).param_groups
    scales = {id(parameter): group["lr_scale"] for group in groups for parameter in group["params"]}
    depths = group_parameters(model, model.group_matcher(), reverse=True)
    by_depth = {}
    for key, parameter in model.named_parameters():
        by_depth.setdefault(depths[key], set()).add(scales[id(parameter)])
    rising = [scale for depth in sorted(by_depth) for scale in by_depth[depth]]
    assert len(rising) == len(by_depth) > 2
    assert rising == sorted(set(rising))
    assert rising[-1] == 1


def test_weight_decay_follows_the_released_training(name):
    decayed = param_groups_weight_decay(create(name), weight_decay=0.05, no_weight_decay_list=())[1]["params"]
    names = {id(parameter): key for key, parameter in create(name).named_parameters()}
    assert names
    shapes = {parameter.ndim for parameter in decayed}
    assert shapes == {2, 4}


def test_hub_round_trip(name, tmp_path):
    model, x = visible(create(name, num_classes=9, in_chans=1, pattern="LLSS")), image(64, 64)[:, :1]
    save_for_hf(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_args"]["pattern"] == "LLSS"
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert_close(other(x), model(x), rtol=0, atol=0)
