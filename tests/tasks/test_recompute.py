import pytest
import timm
import torch
from torch import nn

from linvit.models.dense.backbone import DenseBackbone
from linvit.tasks.classification import Classification


@pytest.mark.parametrize("what", ["nothing", "cheap", "blocks"])
def test_a_training_step_is_the_same_bit_for_bit(what):
    losses = {}
    for chosen in ("nothing", what):
        torch.manual_seed(0)
        task = Classification(timm.create_model("care_nano", num_classes=3).double(), 3, recompute=chosen)
        task.rehearsing = True
        task.training_step((torch.rand(2, 3, 32, 32, dtype=torch.float64), torch.tensor([0, 2])), 0).backward()
        losses[chosen] = [parameter.grad for parameter in task.network.parameters()]
        assert {stage.recomputed for stage in task.network.stages} == {chosen}
    for one, other in zip(losses["nothing"], losses[what], strict=True):
        assert torch.equal(one, other)


def test_networks_inside_others_and_of_timm():
    inside = nn.Sequential(DenseBackbone("ravlt_nano"))
    Classification(inside, 3, recompute="cheap")
    assert {stage.recomputed for stage in inside[0].body.stages} == {"cheap"}
    other = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3)
    Classification(other, 3, recompute="blocks")
    assert other.grad_checkpointing
    with pytest.raises(
        ValueError, match=r"^`recompute` is 'cheap', which this network cannot: set it to nothing, or bl"
    ):
        Classification(other, 3, recompute="cheap")
    with pytest.raises(ValueError, match=r"^`recompute` is 'blocks', which this network cannot: set it to nothing\.$"):
        Classification(nn.Linear(2, 2), 2, recompute="blocks")
