"""Layers whose attention is cut into blocks: MHLA as released, and blocks with other mechanisms."""

import numpy as np
import pytest
import timm
import torch
from golden_networks import filled, golden
from torch.nn.functional import conv3d, linear, relu, rms_norm, silu
from torch.testing import assert_close

import linvit
from linvit.analysis.cost import count_cost
from linvit.analysis.probe import probe
from linvit.analysis.rank import STATE, measure_ranks
from linvit.layers.mixer import ValueAttention
from linvit.layers.operator import Operator, in_heads, merged
from linvit.layers.recent_mechanisms import MHLAAttention
from linvit.layers.token_attention import TokenAttention
from linvit.ops import linear_attention, rotary_3d
from linvit.parallel.layers import check_layers

RECORDS = golden("mechanisms_2026")
OURS = {
    "norm": "input_norm",
    "to_qkv": "qkv",
    "q_norm": "query_norm",
    "k_norm": "key_norm",
    "lepe": "lepe",
    "piece_attn.conv": "operator",
    "to_out.0": "proj",
}


def our_name(released):
    layer, parameter = released.rsplit(".", 1)
    return "operator.mixing" if layer == "piece_attn.conv" else f"{OURS[layer]}.{parameter}"


def released_layer(record, released_denominator):
    width = record["input_shape"][-1]
    side = int(record["input_shape"][1] ** 0.5), int(record["input_shape"][2] ** 0.5)
    grid = (side[0] * side[1],) * 2
    dd = {"dtype": torch.float64}
    layer = MHLAAttention(
        width, {32: 2, 192: 3}[width], "mhla", grid, qkv_bias=False, blocks=(side[0], side[0]),
        released_denominator=released_denominator, **dd,
    )  # fmt: skip
    weights = filled(record["parameters"])
    weights["piece_attn.conv.weight"] = weights["piece_attn.conv.weight"].flatten(1).abs()
    number = len(weights["piece_attn.conv.weight"])
    weights["piece_attn.conv.weight"] *= number**0.5 / number  # the rule of the file: |n| / M
    if "initial" in record["name"]:
        weights["piece_attn.conv.weight"] = layer.operator.mixing.detach().clone()
    layer.load_state_dict({our_name(key): value for key, value in weights.items()})
    return layer, side


def on_grid(x, side):
    """(batch, blocks, tokens of a block, channels) as tokens row by row."""
    x = x.unflatten(1, (side[0], side[0])).unflatten(3, (side[1], side[1]))
    return x.transpose(2, 3).flatten(1, 4)


def in_blocks(x, side):
    x = x.unflatten(1, (side[0], side[1], side[0], side[1])).transpose(2, 3)
    return x.flatten(3, 4).flatten(1, 2)


@pytest.mark.parametrize("name", ["mhla_small", "mhla_deit_tiny", "mhla_deit_tiny_initial_mixing"])
@pytest.mark.parametrize("released", [True, False], ids=["released denominator", "equation 4"])
def test_equals_the_released_layer(name, released):
    record = {**RECORDS[name], "name": name}
    layer, side = released_layer(record, released)
    x = torch.from_numpy(np.random.RandomState(0).standard_normal(record["input_shape"])).requires_grad_()
    out = in_blocks(layer(on_grid(x, side)), side)
    expected = record["output" if released else "output_with_equation_4"]
    values = torch.tensor(expected["value"], dtype=torch.float64)
    tight = 1e-9 if released else 1e-4  # Eq. 4 adds eps to a sum; ours, to a mean
    assert_close(out.flatten()[expected["index"]], values, rtol=tight, atol=tight)
    if not released:
        return
    out.mul(torch.from_numpy(np.random.RandomState(1).standard_normal(out.shape))).sum().backward()
    gradient = record["input_gradient"]
    assert_close(
        x.grad.flatten()[gradient["index"]], torch.tensor(gradient["value"], dtype=torch.float64), rtol=1e-8, atol=1e-8
    )
    parameters = dict(layer.named_parameters())
    for key, norm in record["gradient_norms"].items():
        assert_close(parameters[our_name(key)].grad.norm().item(), norm, rtol=1e-8, atol=0)


def video_layer(x, weights, mixing, layout, grid):
    """The released layer of videos, from the operator: blocks in three dimensions, and the released denominator."""

    def normed(t, name):
        return rms_norm(t, t.shape[-1:], weights[f"{name}.weight"], eps=1e-6)

    def cut(t):
        return t[:, :, order].unflatten(2, (len(mixing), -1))

    q, k, v, *gate = (
        linear(x, weights[f"{n}.weight"], weights[f"{n}.bias"]) for n in "qkvg" if f"{n}.weight" in weights
    )
    query, key, value = in_heads(normed(q, "norm_q"), 2), in_heads(normed(k, "norm_k"), 2), in_heads(v, 2)
    places = (torch.arange(side) * blocks // side for side, blocks in zip(grid, layout, strict=True))
    numbers = torch.cartesian_prod(*places) @ torch.tensor([layout[1] * layout[2], layout[2], 1])
    order = numbers.argsort(stable=True)
    rotary = rotary_3d(grid, query.shape[-1], endpoint=False, dtype=x.dtype)
    options = {"normalizer": "sum", "mixing": mixing, "blocks": numbers, "rotary": rotary}
    read = linear_attention(query, key, value, feature_map="relu_eps", **options)
    featured, masses = cut(relu(query) + 1e-6), cut(relu(key) + 1e-6).sum(3)
    denominators = torch.einsum("ib, nhbwd, nhbd -> nhiw", mixing, featured, masses).flatten(2)[:, :, order.argsort()]
    out = merged(normed(read / (denominators.unsqueeze(-1) + 1e-6), "g_norm"))
    out = out * silu(gate[0]) if gate else out
    if "lepe.weight" in weights:
        local = conv3d(v.mT.unflatten(2, grid), weights["lepe.weight"], weights["lepe.bias"], padding=1, groups=48)
        out = out + local.flatten(2).mT
    return linear(out, weights["o.weight"], weights["o.bias"])


@pytest.mark.parametrize(
    ("name", "layout", "grid"), [("mhla_3d_image", (1, 2, 3), (1, 4, 6)), ("mhla_3d_video", (2, 2, 3), (4, 4, 6))]
)
def test_blocks_in_three_dimensions_make_the_released_layer_of_videos(name, layout, grid):
    record = RECORDS[name]
    weights = {key: value.requires_grad_() for key, value in filled(record["parameters"]).items()}
    convolution = weights.pop("block_attn.conv.weight").detach().flatten(1).abs()
    mixing = (convolution / len(convolution) ** 0.5).requires_grad_()  # the rule of the file: |n| / M
    x = torch.from_numpy(np.random.RandomState(0).standard_normal(record["input_shape"])).requires_grad_()
    out = video_layer(x, weights, mixing, layout, grid)
    expected, gradient = record["output"], record["input_gradient"]
    assert_close(
        out.flatten()[expected["index"]], torch.tensor(expected["value"], dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    out.mul(torch.from_numpy(np.random.RandomState(1).standard_normal(out.shape))).sum().backward()
    assert_close(
        x.grad.flatten()[gradient["index"]], torch.tensor(gradient["value"], dtype=torch.float64), rtol=1e-8, atol=1e-8
    )
    for key, norm in record["gradient_norms"].items():
        grad = mixing.grad if key.startswith("block_attn") else weights[key].grad
        assert_close(grad.norm().item(), norm, rtol=1e-8, atol=0)


@pytest.mark.parametrize("mechanism", ["linear", "mala", "rala", "inline", "polaformer", "mhla"])
def test_blocks_join_any_mechanism(mechanism):
    """In a ViT with a class token, at other sizes too; the probe's scores are what the operator computed."""
    torch.manual_seed(0)
    network = timm.create_model("vit_tiny_patch16_224", depth=1, embed_dim=32, num_heads=2, dynamic_img_size=True)
    linvit.swap_attention(network, mechanism, attention={"blocks": (3, 2)})
    operator = network.blocks[0].attn.operator
    assert operator.mixing.shape == (7, 7)
    network(torch.randn(2, 3, 80, 112)).sum().backward()
    assert operator.mixing.grad.abs().max() > 0
    (layer,) = probe(network, torch.randn(1, 3, 96, 64))
    seen = merged(layer.scores() @ layer.operands.value)
    assert_close(in_heads(seen, layer.outputs().shape[1]), layer.outputs(), rtol=0, atol=2e-5)
    assert all(row.condition["matrix"] != STATE for row in measure_ranks(network, [torch.randn(1, 3, 64, 64)]))


def test_a_fixed_block_size_cuts_larger_grids_into_more_blocks():
    layer = TokenAttention(32, 2, "mala", (8, 8), blocks=(4, 4), block_sides=(2, 2)).double()
    axes = layer.operator.axes(torch.zeros(1, 2, 128, 16), grid=(8, 16))
    assert axes["blocks"] == (4, 8)
    assert axes["mixing"].shape == (32, 32)
    assert layer(torch.randn(1, 128, 32, dtype=torch.float64), [8, 16]).shape == (1, 128, 32)


def test_entries_outside_their_limits_count_as_the_limit_and_still_learn():
    layer = TokenAttention(16, 2, "linear", (4, 4), blocks=(2, 2)).double()
    with torch.no_grad():
        layer.operator.mixing[0, 1] = -0.2
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    out = layer(x)
    with torch.no_grad():
        layer.operator.mixing[0, 1] = 0
    assert_close(out, layer(x))
    with torch.no_grad():
        layer.operator.mixing[0, 1] = -0.2
    layer(x).square().sum().backward()
    assert layer.operator.mixing.grad[0, 1] != 0


def test_networks_are_as_counted():
    """Parameters of the released DeiTs; products and convolutions within 0.2 % of those counted on them."""
    for name, millions, counted in (("deit_tiny", 5.794, 1.526), ("deit_small", 22.20, 5.769)):
        cost = count_cost(timm.create_model(f"{name}_mhla_256"), (3, 224, 224))
        assert_close(cost.parameters / 1e6, millions, rtol=2e-4, atol=0)
        assert_close((cost.macs + cost.macs_attention) / 1e9, counted, rtol=2e-3, atol=0)
        with_196 = count_cost(timm.create_model(f"{name}_mhla"), (3, 224, 224))
        assert with_196.macs < 0.8 * cost.macs


def test_fused_and_exported_pyramids_are_the_same_network():
    torch.manual_seed(0)
    network = (
        timm.create_model("mavit_nano", pattern="LLLL", attention={"blocks": (3, 3)}, num_classes=3).double().eval()
    )
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    with torch.no_grad():
        expected = network(x)
        exported = torch.export.export(network, (x,)).module()(x)
        assert_close(exported, expected, rtol=1e-10, atol=1e-10)
        assert_close(linvit.fuse(network)(x), expected, rtol=1e-10, atol=1e-10)


def test_what_needs_the_whole_map_says_so():
    network = timm.create_model("mavit_nano", pattern="LLLL", attention={"blocks": (3, 3)}).eval()
    with pytest.raises(ValueError, match="has blocks, which need the whole map at once"):
        linvit.run_in_strips(network, torch.zeros(1, 3, 256, 256))
    with pytest.raises(ValueError, match="with blocks, which need the whole map at once"):
        check_layers(network)
    with pytest.raises(ValueError, match="accepts no blocks here"):
        linvit.swap_attention(timm.create_model("vit_tiny_patch16_224", depth=1), "linear", attention={
            "mechanism": "softmax", "blocks": (2, 2)})  # fmt: skip
    with pytest.raises(ValueError, match="`block_sides` is given without `blocks`"):
        TokenAttention(16, 2, "linear", (4, 4), block_sides=(2, 2))


def test_no_layer_leaves_blocks_out_in_silence():
    care = timm.create_model("care_nano", num_classes=3)
    attended = next(module for module in care.modules() if isinstance(module, ValueAttention))
    width = attended.heads * attended.operator.head_width
    old = attended.operator
    attended.operator = Operator("linear", old.heads, old.head_width, place="maps", blocks=(2, 2))
    attended(torch.randn(1, width, 6, 5)).sum().backward()
    assert attended.operator.mixing.grad.abs().max() > 0
    with pytest.raises(ValueError, match="accepts no blocks here"):
        Operator("linear", 2, 8, place="sequences", blocks=(2, 2))
    with pytest.raises(ValueError, match="has blocks, but its layer gives no `grid`"):
        Operator("linear", 2, 8, blocks=(2, 2))(*torch.randn(3, 1, 2, 9, 8))
