"""timm's own networks and swapped ones, fused."""

import pytest
import timm
import torch
from fused_networks import error, images, randomised
from tiers import quick
from timm.layers import ConvNormAct, LayerScale
from torch import nn

import linvit
from linvit.layers.mechanisms import MECHANISMS

IN_SWIN = [name for name, entry in MECHANISMS.items() if "swin_tiny" in entry.networks]


def compare(model, x):
    """The outputs of the fused model in float64; the fused model."""
    model, x = model.double(), x.double()
    fused = linvit.fuse(model)
    with torch.inference_mode():
        assert error(fused(x), model(x)) < 1e-10
    return fused


def num_batch_norms(model):
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def weighted_norms(model):
    return [name for name, m in model.named_modules() if isinstance(m, nn.LayerNorm) and m.elementwise_affine]


@pytest.mark.parametrize("mechanism", [name for name, entry in MECHANISMS.items() if "deit_tiny" in entry.networks])
def test_deit_with_every_mechanism(mechanism):
    model = timm.create_model(f"deit_tiny_{mechanism}", depth=1, num_classes=3, img_size=64, init_values=0.5)
    fused = compare(randomised(model), images(64, 64))
    followed_by_a_norm = ["blocks.0.norm1", "blocks.0.attn.input_norm"] if mechanism == "mhla" else []
    kept = ["blocks.0.attn.ln"] if mechanism == "nala" else []
    assert weighted_norms(fused) == [*followed_by_a_norm, *kept, "fc_norm" if mechanism == "mhla" else "norm"]
    assert num_batch_norms(fused) == 0
    assert not any(isinstance(module, nn.BatchNorm1d) for module in fused.modules())
    assert not any(isinstance(module, LayerScale) for module in fused.modules())


@pytest.mark.parametrize("mechanism", quick(IN_SWIN, ["softmax", "rala", "mala", "focused", "agent", "enhanced"]))
def test_swin_with_every_mechanism_and_padded_windows(mechanism):
    model = timm.create_model(f"swin_tiny_{mechanism}", depths=(1, 1, 1, 1), num_classes=3, img_size=64, embed_dim=48)
    fused = compare(randomised(model), images(64, 64, batch=1))
    windowed = [f"layers.{i}.blocks.0.norm1" for i, letter in enumerate(model.pattern) if letter == "S"]
    kept = {"nala": ("attn.ln",), "mhla": ("norm1", "attn.input_norm")}.get(mechanism, ())
    linear = [i for i, letter in enumerate(model.pattern) if letter == "L"]
    expected = {
        "patch_embed.norm",
        "norm",
        *windowed,
        *(f"layers.{i}.blocks.0.{norm}" for i in linear for norm in kept),
    }
    assert set(weighted_norms(fused)) == expected


@pytest.mark.parametrize("modulation", ["linear", "identity", "none"])
def test_a_gate_that_reads_the_norm_keeps_its_weights(modulation):
    model = timm.create_model("deit_tiny_rala", depth=1, img_size=64, attention={"modulation": modulation})
    fused = compare(randomised(model), images(64, 64))
    assert ("blocks.0.norm1" in weighted_norms(fused)) == (modulation == "identity")


EVA = {
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "biases of its own": ("eva_giant_patch14_224", {"init_values": 0.5}),
    "SwiGLU": ("eva02_base_patch14_224", {"init_values": 0.5}),
    "separate projections": ("vit_small_patch16_dinov3", {"attn_type": "rope", "qkv_fused": False, "swiglu_mlp": True}),
}


@pytest.mark.parametrize("mechanism", [None, "mala", "inline", "vittt"])
@pytest.mark.parametrize(("name", "kwargs"), EVA.values(), ids=EVA)
def test_eva(name, kwargs, mechanism):
    sizes = {"img_size": 64, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = timm.create_model(name, **sizes, **kwargs)
    model = model if mechanism is None else linvit.swap_attention(model, mechanism)
    fused = compare(randomised(model), images(64, 64))
    kept = {name for name in weighted_norms(fused) if name.startswith("blocks.0.norm")}
    biased = mechanism is None and getattr(model.blocks[0].attn, "q_bias", None) is not None
    assert kept == ({"blocks.0.norm1"} if biased else set())
    assert fused.blocks[0].gamma_1 is None


def test_pvt():
    model = linvit.swap_attention(timm.create_model("pvt_v2_b0", num_classes=3), "rala", pattern="LLSS")
    fused = compare(randomised(model), images(64, 96))
    assert not any(name.endswith("norm2") for name in weighted_norms(fused))


def test_convolutions_with_batch_norm_in_an_unknown_network():
    model = timm.create_model("mobilenetv4_conv_small", num_classes=3)
    fused = compare(randomised(model), images(64, 96))
    pairs = [module for module in fused.modules() if isinstance(module, ConvNormAct)]
    assert pairs
    assert not any(isinstance(module.bn, nn.BatchNorm2d) for module in pairs)
    assert num_batch_norms(model) >= num_batch_norms(fused) + len(pairs)


def test_an_unknown_network_is_copied():
    model = randomised(timm.create_model("convnext_atto", num_classes=3))
    fused, x = linvit.fuse(model), images(64, 96)
    assert fused is not model
    assert torch.equal(fused(x), model(x))
    assert fused.state_dict().keys() == model.state_dict().keys()


def test_a_layer_used_twice_is_folded_once():
    pair = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model = randomised(nn.Sequential(pair, nn.GELU(), pair))
    fused = compare(model, images(8, 8))
    assert fused[0] is fused[2]


def test_batch_norm_without_statistics_stays():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)))
    assert isinstance(compare(model, images(8, 8))[1], nn.BatchNorm2d)
