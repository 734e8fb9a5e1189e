import pytest
import timm
import torch
from torch import nn

import linvit  # noqa: F401
from linvit.analysis.probe import KINDS, _kind, probe, unseen_attention
from linvit.layers.token_mechanisms import TOKEN_ATTENTIONS
from linvit.models.swap import swap_attention


@pytest.mark.parametrize(
    ("name", "arguments", "mechanisms"),
    [
        ("ravlt_nano", {}, ["rala"] * 5),
        ("mavit_nano", {"pattern": "LLSS"}, ["mala", "mala", "softmax", "softmax", "softmax"]),
        ("care_nano", {"pattern": "CCLS"}, None),
    ],
)
def test_scores_times_values_are_the_outputs(name, arguments, mechanisms):
    network = timm.create_model(name, dtype=torch.float64, **arguments)
    network.train()
    probes = probe(network, torch.randn(2, 3, 64, 96, dtype=torch.float64))
    assert network.training
    if mechanisms:
        assert [p.mechanism for p in probes] == mechanisms
        assert [p.grid for p in probes][::4] == [(16, 24), (2, 3)]
    else:
        assert {p.mechanism for p in probes} == {"linear", "softmax"}
    for one in probes:
        torch.testing.assert_close(one.scores() @ one.operands.value, one.outputs())


def test_probing_leaves_no_hook_behind():
    network = timm.create_model("ravlt_nano")
    probe(network, torch.randn(1, 3, 32, 32))
    assert not any(module._forward_hooks for module in network.modules())


SMALL = {"img_size": 48, "patch_size": 16, "embed_dim": 48, "depth": 2}


@pytest.mark.parametrize("mechanism", list(TOKEN_ATTENTIONS))
def test_swapped_networks_show_what_they_return(mechanism):
    if f"deit_tiny_{mechanism}" in timm.list_models("deit_tiny_*"):
        network = timm.create_model(f"deit_tiny_{mechanism}", dtype=torch.float64, **SMALL)
    else:
        network = swap_attention(timm.create_model("deit_tiny_patch16_224", **SMALL), mechanism).double()
    for one in probe(network, torch.randn(2, 3, 48, 48, dtype=torch.float64)):
        assert one.mechanism == mechanism
        assert (one.grid, one.num_prefix) == ((3, 3), 1)
        heads = 6 if mechanism == "inline" else 3
        assert {x.shape for x in one.features.values()} == {(2, heads, 10, 48 // heads)}
        last = list(one.features.values())[-1].transpose(1, 2).flatten(2)
        block = network.get_submodule(one.name)
        taken = []
        handle = block.proj.register_forward_hook(lambda module, args, output, taken=taken: taken.append(args[0]))
        torch.manual_seed(1)
        x = torch.randn(2, 10, 48, dtype=torch.float64)
        block.eval()(x)
        handle.remove()
        again = KINDS[_kind(block)](one.name, block, (x,), network, torch.empty(2, 3, 48, 48))
        torch.testing.assert_close(list(again.features.values())[-1].transpose(1, 2).flatten(2), taken[0])
        assert last.isfinite().all()


def test_gated_attention_shows_each_step():
    network = timm.create_model("deit_tiny_rala", **SMALL)
    assert list(probe(network, torch.randn(1, 3, 48, 48))[0].features) == ["mixed", "local", "modulated"]
    bare = timm.create_model("deit_tiny_rala", attention={"lepe": False, "modulation": "none"}, **SMALL)
    assert list(probe(bare, torch.randn(1, 3, 48, 48))[0].features) == ["mixed"]


def test_layers_are_chosen_by_name():
    network = timm.create_model("ravlt_nano")
    images = torch.randn(1, 3, 32, 32)
    assert [one.name for one in probe(network, images, ["stages.1.blocks.0.attn"])] == ["stages.1.blocks.0.attn"]
    with pytest.raises(ValueError, match=r"no attention layer 'stem', but stages\.0\.blocks\.0\.attn"):
        probe(network, images, ["stem"])


def test_swin_says_what_it_does_not_show():
    network = timm.create_model("swin_tiny_rala", img_size=64, depths=(1, 1, 1, 1))
    probes = probe(network, torch.randn(1, 3, 64, 64))
    assert [(one.mechanism, one.grid) for one in probes] == [("rala", (16, 16)), ("rala", (8, 8))]
    assert unseen_attention(network) == ["WindowAttention"]
    assert unseen_attention(timm.create_model("deit_tiny_rala", **SMALL)) == []


def test_a_network_without_our_attention_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention to look at, expected Attention2d, ValueAttention"):
        probe(nn.Linear(2, 2), torch.randn(1, 2))
