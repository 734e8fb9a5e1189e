import copy

import pytest
import timm
import torch
from golden_networks import golden, released_keys, released_state_dict
from test_all_models import create, image, visible
from torch.testing import assert_close

import linvit


@pytest.fixture
def care():
    return visible(create("care_nano", num_classes=5))


def test_logits_are_the_mean_of_both_heads(care):
    features = care.forward_features(image(64, 64)).mean((2, 3))
    assert_close(care(image(64, 64)), (care.head(features) + care.dist_head(features)) / 2)


def test_a_pair_only_while_training_with_distillation(care):
    x = image(64, 64)
    care.eval().set_distilled_training(True)
    assert isinstance(care(x), torch.Tensor)
    care.train()
    logits, distilled = care(x)
    assert logits.shape == distilled.shape == (2, 5)
    assert not torch.equal(logits, distilled)
    care.set_distilled_training(False)
    assert isinstance(care(x), torch.Tensor)


def test_one_head_without_distillation():
    model = visible(create("care_nano", num_classes=5, distillation=False))
    assert model.dist_head is None
    assert model.get_classifier() is model.head.fc
    features = model.forward_features(image(64, 64)).mean((2, 3))
    assert_close(model(image(64, 64)), model.head(features))


def test_both_classifiers_are_reset(care):
    care.reset_classifier(8)
    assert [classifier.out_features for classifier in care.get_classifier()] == [8, 8]


def test_unpooled_heads_work_at_every_position(care):
    x = image(64, 96)
    features = care.forward_features(x)
    care.reset_classifier(5, "")
    logits = care(x)
    assert logits.shape == (2, 5, 2, 3)
    one = features[:, :, 1, 2]
    assert_close(logits[:, :, 1, 2], (care.head(one) + care.dist_head(one)) / 2)


@pytest.mark.parametrize("pool", ["max", "catavgmax"])
def test_other_pooling_is_refused(pool):
    with pytest.raises(ValueError, match=f"`global_pool` is '{pool}', expected one of avg"):
        timm.create_model("care_nano", global_pool=pool)
    with pytest.raises(ValueError, match=f"`global_pool` is '{pool}', expected one of avg"):
        timm.create_model("care_nano").reset_classifier(3, pool)


@pytest.mark.parametrize("size", ["0", "1", "2"])
def test_every_released_key_has_its_place(size):
    model = timm.create_model(f"care_s{size}", device="meta")
    keys = released_keys(golden(f"CARETrans_S{size}"))
    native = model.native_state_dict({key: torch.empty(shape, device="meta") for key, shape, _ in keys})
    assert {key: value.shape for key, value in native.items()} == {k: v.shape for k, v in model.state_dict().items()}


def test_filter_is_idempotent_and_accepts_a_checkpoint_without_heads():
    model = timm.create_model("care_s0", device="meta")
    state = released_state_dict(golden("CARETrans_S0"))
    native = model.native_state_dict(state)
    assert model.native_state_dict(native).keys() == native.keys()
    headless = model.native_state_dict({key: value for key, value in state.items() if "head" not in key})
    assert headless.keys() == {key for key in native if "head" not in key}


def test_released_file_through_timm(tmp_path):
    state = {key: value.float() for key, value in released_state_dict(golden("CARETrans_S0")).items()}
    torch.save({"state_dict": state}, tmp_path / "S0.pth")
    overlay = {"file": str(tmp_path / "S0.pth")}
    model = timm.create_model("care_s0", pretrained=True, pretrained_cfg_overlay=overlay).eval()
    expected = linvit.load_released(timm.create_model("care_s0"), state).eval()
    assert_close(model(image(64, 96)), expected(image(64, 96)), rtol=0, atol=0)


@pytest.mark.parametrize("pattern", ["CCLL", "LLLL", "CCSS", "LSLS"])
def test_patterns_change_the_attended_part_only(pattern):
    model = create("care_nano", pattern=pattern)
    mechanisms = ["strips" if "vertical" in dict(stage.blocks[0].mixer.attended.named_children()) else "attention"
              for stage in model.stages]  # fmt: skip
    assert mechanisms == ["strips" if letter == "C" else "attention" for letter in pattern]
    assert model(image(64, 64)).isfinite().all()


def test_recomputed_blocks_count_a_batch_once_in_batch_norm():
    network = timm.create_model("care_nano", num_classes=3).train()
    other = copy.deepcopy(network)
    other.set_grad_checkpointing()
    x = torch.randn(4, 3, 64, 64)
    for each in (network, other):
        each(x).sum().backward()
    for key, value in network.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key
