import pytest
import timm
import torch
from test_all_models import create, image, visible
from torch.testing import assert_close


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


@pytest.mark.parametrize("pattern", ["CCLL", "LLLL", "CCSS", "LSLS"])
def test_patterns_change_the_attended_part_only(pattern):
    model = create("care_nano", pattern=pattern)
    mechanisms = ["strips" if "vertical" in dict(stage.blocks[0].mixer.attended.named_children()) else "attention"
              for stage in model.stages]  # fmt: skip
    assert mechanisms == ["strips" if letter == "C" else "attention" for letter in pattern]
    assert model(image(64, 64)).isfinite().all()
