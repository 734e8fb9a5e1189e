import itertools
import random

import pytest
import timm
import torch
from fused_networks import randomised
from timm.layers import Attention
from torch import nn

from linvit.analysis.probe import LOCAL, MIXED, MODULATED, attention_layers, probe, unseen_attention
from linvit.analysis.rank import measure_ranks
from linvit.analysis.scores import measure_scores, score_rows
from linvit.layers.mechanisms import LINEAR_AXES, MECHANISMS
from linvit.layers.token_mechanisms import FocusedAttention, PolarAttention
from linvit.models.by_name import create
from linvit.models.swap import swap_attention

SMALL = {"img_size": 48, "patch_size": 16, "embed_dim": 48, "depth": 2}
SCORED = [name for name, entry in MECHANISMS.items() if not entry.nonlinear]
NARROW = {"embed_dim": 48, "depths": (1, 1, 1, 1)}
SURROUNDINGS = [
    {"modulation": modulation, "lepe": lepe, "rope": rope}
    for modulation in ("linear", "tanh", "identity", "none")
    for lepe in (True, False)
    for rope in (True, False)
]
AXES = [
    {"feature_map": "relu", "weighting": "uniform"},
    {"feature_map": ["elu1", "exp"], "normalizer": "magnitude_no_beta"},
    {"weighting": "learned", "normalizer": "learned"},
]
EVERY = list(itertools.product(("ravlt_nano", "mavit_nano"), ("LLLL", "LLSS", "SSSS"), SURROUNDINGS))
# all surroundings of one pattern, all patterns in one, and some of the others
PYRAMIDS = [case for case in EVERY if case[:2] == ("ravlt_nano", "LLSS") or case[2] == SURROUNDINGS[0]]
PYRAMIDS += random.Random(0).sample([case for case in EVERY if case not in PYRAMIDS], 6)
TOKENS = [("deit_tiny_rala", attention) for attention in SURROUNDINGS]
TOKENS += [("swin_tiny_mala", attention) for attention in random.Random(0).sample(SURROUNDINGS, 3)]
LOCAL_TERMS = ("lepe", "dwc", "dconv", "local")


class Seen:
    """What hooks on an attention and the layers in it see, each as (batch, tokens, channels)."""

    def __init__(self, attention):
        self.last = self.mixed = self.local = None
        if hasattr(attention, "proj"):
            attention.proj.register_forward_pre_hook(lambda _, args: setattr(self, "last", rows(args[0])))
        else:
            attention.register_forward_hook(lambda _, args, output: setattr(self, "last", rows(output)))
        if hasattr(attention, "operator"):
            attention.operator.register_forward_hook(lambda _, args, output: setattr(self, "mixed", merged(output)))
        for layer in (getattr(attention, name, None) for name in LOCAL_TERMS):
            shared = isinstance(attention, FocusedAttention | PolarAttention)  # by all heads, which it sees one by one
            if isinstance(layer, nn.Module) and not shared:
                layer.register_forward_hook(lambda _, args, output: setattr(self, "local", rows(output.clone())))


def rows(x):
    return x.flatten(2).mT if x.dim() == 4 else x


def merged(x):
    return x.transpose(1, 2).flatten(2)


def check(network, *inputs):
    """Compares every probe of a randomised network in float64 with the hooks; returns the probes."""
    network = randomised(network).double()
    seen = {name: Seen(network.get_submodule(name)) for name in attention_layers(network)}
    probes = probe(network, inputs if len(inputs) > 1 else inputs[0])
    assert [p.name for p in probes] == list(seen)
    for shown in probes:
        hooks, steps = seen[shown.name], {name: merged(x) for name, x in shown.features.items()}
        torch.testing.assert_close(list(steps.values())[-1], hooks.last)
        torch.testing.assert_close(merged(shown.scores() @ shown.operands.value), steps[MIXED])
        if hooks.mixed is not None:
            torch.testing.assert_close(steps[MIXED], hooks.mixed)
        if hooks.local is not None and shown.mechanism != "linear_angular":
            added = (steps[LOCAL] - steps[MIXED])[:, shown.num_prefix :]
            torch.testing.assert_close(added, hooks.local)
        assert shown.grid[0] * shown.grid[1] + shown.num_prefix == hooks.last.shape[1]
    return probes


def images(height=64, width=96):
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize(("name", "pattern", "attention"), PYRAMIDS)
def test_probes_of_pyramids_are_what_the_layers_see(name, pattern, attention):
    probes = check(timm.create_model(name, pattern=pattern, attention=attention), images())
    linear = name.replace("ravlt_nano", "rala").replace("mavit_nano", "mala")
    stages = [{"L": linear, "S": "softmax"}[pattern[int(p.name.split(".")[1])]] for p in probes]
    assert [p.mechanism for p in probes] == stages
    assert [p.grid for p in probes] == [(16, 24), (8, 12), (4, 6), (4, 6), (2, 3)]
    for shown in probes:
        expected = {MIXED, *([LOCAL] if attention["lepe"] else [])}
        expected |= set() if attention["modulation"] == "none" else {MODULATED}
        assert set(shown.features) == expected
        assert (shown.operands.rotary is not None) == attention["rope"]


@pytest.mark.parametrize("name", ["ravlt_nano", "mavit_nano", "deit_tiny_rala", "deit_tiny_rala_mala"])
@pytest.mark.parametrize("attention", AXES)
def test_probes_follow_the_axes(name, attention):
    size = SMALL if name.startswith("deit") else {}
    check(timm.create_model(name, attention=attention, **size), images(48, 48))


@pytest.mark.parametrize("pattern", ["CCLL", "LLSS", "CCLS"])
@pytest.mark.parametrize("split", ["asymmetric", "stacked", "attended"])
def test_probes_of_care_are_what_the_layers_see(pattern, split):
    probes = check(timm.create_model("care_nano", pattern=pattern, split=split), images())
    assert {p.mechanism for p in probes} == {name for name in ("linear", "softmax") if name[0].upper() in pattern}


@pytest.mark.parametrize("mechanism", SCORED)
def test_probes_of_deit_are_what_the_layers_see(mechanism):
    network = swap_attention(timm.create_model("deit_tiny_patch16_224", **SMALL), mechanism)
    for shown in check(network, images(48, 48)):
        assert (shown.mechanism, shown.grid, shown.num_prefix) == (mechanism, (3, 3), 1)


@pytest.mark.parametrize("mechanism", list(LINEAR_AXES))
def test_probes_of_every_mechanism_follow_learned_axes(mechanism):
    network = timm.create_model("deit_tiny_patch16_224", **SMALL)
    learned = {"weighting": "learned", "normalizer": "learned"}
    check(swap_attention(network, mechanism, attention=learned), images(48, 48))


@pytest.mark.parametrize("mechanism", SCORED)
def test_probes_of_swin_are_what_the_layers_see(mechanism):
    network = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=2, **NARROW)
    probes = check(swap_attention(network, mechanism, "LLSS"), images(64, 64))
    assert [(p.mechanism, p.grid) for p in probes] == [(mechanism, (16, 16)), (mechanism, (8, 8))]


@pytest.mark.parametrize("mechanism", ["vittt"])
def test_a_nonlinear_read_has_outputs_and_no_scores(mechanism):
    network = randomised(swap_attention(timm.create_model("deit_tiny_patch16_224", **SMALL), mechanism))
    seen = Seen(network.blocks[1].attn)
    (shown,) = probe(network, images(48, 48).float(), ["blocks.1.attn"])
    assert torch.equal(merged(shown.outputs()), seen.last)
    for refused in (shown.scores, shown.kv_state, lambda: score_rows(shown.operands, torch.tensor([0]))):
        with pytest.raises(
            ValueError, match="the attention reads its values nonlinearly, so it has no matrix of scores"
        ):
            refused()
    with pytest.raises(ValueError, match="has no matrix of scores"):
        network.blocks[1].attn.scores(torch.randn(1, 10, 48), (3, 3))
    ranks = measure_ranks(network, [images(48, 48).float()])
    assert {entry.condition["matrix"] for entry in ranks} == {MIXED}
    with pytest.raises(ValueError, match="choose layers with another mechanism, or analyze ranks"):
        measure_scores(network, [images(48, 48).float()])


def test_attention_of_half_the_size_has_scores_of_half_the_size():
    body = timm.create_model("deit_tiny_patch16_224", **{**SMALL, "img_size": 80})
    network = randomised(swap_attention(body, "recnext", attention={"half": True})).double()
    for shown in probe(network, images(80, 80)):
        assert (shown.grid, shown.scores().shape[-2:]) == ((3, 3), (10, 10))
        torch.testing.assert_close(shown.scores() @ shown.operands.value, shown.outputs())
        assert shown.features[LOCAL].shape[-2] == 26


@pytest.mark.parametrize(("name", "attention"), TOKENS)
def test_probes_of_gated_tokens_are_what_the_layers_see(name, attention):
    size = SMALL if name.startswith("deit") else {"img_size": 64, **NARROW}
    probes = check(timm.create_model(name, attention=attention, **size), images(size["img_size"], size["img_size"]))
    assert all((p.operands.rotary is not None) == attention["rope"] for p in probes)


@pytest.mark.parametrize(
    "options", [{}, {"qk_norm": True}, {"gated": True}, {"gated": True, "scale_norm": True, "qk_norm": True}]
)
def test_probes_of_timms_attention_are_what_the_layers_see(options):
    network = timm.create_model("deit_tiny_patch16_224", **SMALL)
    network.blocks[0].attn = Attention(48, 3, norm_layer=nn.LayerNorm, **options)
    assert {p.mechanism for p in check(network, images(48, 48))} == {"softmax"}


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "mala", "rala"])
@pytest.mark.parametrize("local", [False, True])
def test_probes_of_a_dit_are_what_the_layers_see(mechanism, local):
    network = create("dit_nano_patch2", 10, mechanism=mechanism, local=local)
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    probes = check(network, x, torch.tensor([3, 700]), torch.tensor([1, 10]))
    assert [(p.mechanism, p.grid) for p in probes] == [(mechanism, (4, 4))] * 4
    assert unseen_attention(network) == []


def test_probing_keeps_the_mode_and_leaves_no_hook_behind():
    network = timm.create_model("ravlt_nano").train()
    probe(network, torch.randn(1, 3, 32, 32))
    assert network.training
    assert not any(module._forward_hooks for module in network.modules())


def test_layers_are_chosen_by_name():
    network = timm.create_model("ravlt_nano")
    shown = probe(network, torch.randn(1, 3, 32, 32), ["stages.1.blocks.0.attn"])
    assert [p.name for p in shown] == ["stages.1.blocks.0.attn"]
    with pytest.raises(ValueError, match=r"`layers` is \['stem'\], expected a list of one of stages\.0"):
        probe(network, torch.randn(1, 3, 32, 32), ["stem"])


def test_swin_says_what_it_does_not_show():
    network = timm.create_model("swin_tiny_rala", img_size=64, **NARROW)
    assert unseen_attention(network) == ["WindowAttention"]
    assert unseen_attention(timm.create_model("deit_tiny_rala", **SMALL)) == []


def test_a_network_without_our_attention_is_refused():
    with pytest.raises(ValueError, match="Linear has no attention that can be analyzed"):
        probe(nn.Linear(2, 2), torch.randn(1, 2))
