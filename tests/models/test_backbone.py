import pytest
import torch
from test_all_models import create
from torch import nn

from linvit.models.backbone import init_weights


def test_init_weights():
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(64, 64, 3), nn.BatchNorm2d(8)
    nn.init.constant_(norm.weight, 5.0)
    init_weights(conv, needs_reset=False)
    init_weights(norm, needs_reset=False)
    assert conv.bias.eq(0).all()
    assert conv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert norm.weight.eq(5).all()
    init_weights(norm, needs_reset=True)
    assert norm.weight.eq(1).all()


@pytest.mark.parametrize("name", ["mavit_nano", "care_nano"])
def test_pruned_backbone_has_no_parameter_behind_its_last_stage(name):
    model = create(name)
    model.prune_intermediate_layers([1])
    assert {key.split(".")[0] for key, _ in model.named_parameters()} == {"stem", "stages"}
    assert len(model.stages) == 2


@pytest.mark.parametrize("name", ["mavit_nano", "care_nano"])
def test_pruning_without_the_head_keeps_it(name):
    model = create(name, num_classes=0)
    keys = model.state_dict().keys()
    assert model.prune_intermediate_layers([3], prune_head=False) == [3]
    assert model.state_dict().keys() == keys
