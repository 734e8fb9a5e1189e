import pytest
import timm
import torch
from torch import nn

import linvit  # noqa: F401
from linvit.analysis.probe import probe


@pytest.mark.parametrize(
    ("name", "arguments", "mixers"),
    [
        ("ravlt_nano", {}, ["rala"] * 5),
        ("mavit_nano", {"pattern": "LLSS"}, ["mala", "mala", "softmax", "softmax", "softmax"]),
        ("care_nano", {"pattern": "CCLS"}, None),
    ],
)
def test_scores_times_values_are_the_outputs(name, arguments, mixers):
    network = timm.create_model(name, dtype=torch.float64, **arguments)
    network.train()
    probes = probe(network, torch.randn(2, 3, 64, 96, dtype=torch.float64))
    assert network.training
    if mixers:
        assert [p.mechanism for p in probes] == mixers
        assert [p.grid for p in probes][::4] == [(16, 24), (2, 3)]
    else:
        assert {p.mechanism for p in probes} == {"linear", "softmax"}
    for one in probes:
        torch.testing.assert_close(one.scores() @ one.operands.value, one.outputs())


def test_probing_leaves_no_hook_behind():
    network = timm.create_model("ravlt_nano")
    probe(network, torch.randn(1, 3, 32, 32))
    assert not any(module._forward_hooks for module in network.modules())


def test_a_network_without_our_attention_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention to look at, expected Attention2d, ValueAttention"):
        probe(nn.Linear(2, 2), torch.randn(1, 2))
