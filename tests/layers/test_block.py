import pytest
import torch
from torch.nn.functional import gelu
from torch.testing import assert_close

from linvit.layers import AttentionBlock, CareBlock, ConvFeedForward, rotary_table


def test_attention_block_adds_each_scaled_branch():
    torch.manual_seed(0)
    block = AttentionBlock(8, 2, "mala", layer_scale=0.5)
    x = torch.randn(2, 8, 3, 5)
    rotary = rotary_table(x, 4)
    y = x + block.cpe(x)
    y = y + 0.5 * block.attn(block.norm1(y), rotary)
    y = y + 0.5 * block.ffn(block.norm2(y))
    assert_close(block(x, rotary), y)


def test_last_block_returns_the_hidden_map():
    block = CareBlock(8, 2, "linear", (2, 3), last=True)
    assert block(torch.randn(2, 8, 3, 5)).shape == (2, 24, 3, 5)
    assert block.gamma is None
    assert block.interact_memory.fc2 is None


def test_stochastic_depth_leaves_the_skip_connection():
    torch.manual_seed(0)
    block = CareBlock(8, 2, "strips", (2, 2), layer_scale=1.0, drop_path=1 - 1e-9).train()
    x = torch.randn(2, 8, 3, 5)
    assert torch.equal(block(x), x)


def test_attention_block_without_position_term():
    torch.manual_seed(0)
    block = AttentionBlock(8, 2, "rala", layer_scale=0.0, cpe=False, attention={"modulation": "none"})
    x = torch.randn(2, 8, 3, 5)
    assert torch.equal(block(x, rotary_table(x, 4)), x)
    assert not [name for name in block.state_dict() if name.startswith("cpe")]
    assert block.attn.qkvo.out_channels == 24


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("second", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_care_block_without_interactions_or_memory(first, second, memory):
    torch.manual_seed(0)
    width = 8 if memory else 6
    block = CareBlock(width, 2, "linear", (2, 2), interactions=(first, second), memory=memory, layer_scale=0.5).eval()
    x = torch.randn(2, width, 3, 5)
    mixed = block.mixer(x[:, -6:])
    if first:
        mixed = block.interact_features(mixed)
    if memory:
        mixed = torch.cat((x[:, :2], mixed), dim=1)
    if second:
        mixed = block.interact_memory(mixed)
    assert_close(block(x), x + 0.5 * mixed)
    kept = {name.partition(".")[0] for name, _ in block.named_parameters()}
    assert kept == {"mixer", "gamma", *["interact_features"] * first, *["interact_memory"] * second}


def test_last_block_without_second_interaction_is_like_the_others():
    block = CareBlock(8, 2, "linear", (2, 3), last=True, interactions=(True, False), layer_scale=0.0)
    x = torch.randn(2, 8, 3, 5)
    assert torch.equal(block(x), x)


def test_feed_forward_is_two_pointwise_layers_around_a_depthwise_residual():
    torch.manual_seed(0)
    layer = ConvFeedForward(6, 3.5, dtype=torch.float64)
    x = torch.randn(2, 6, 5, 3, dtype=torch.float64)
    hidden = gelu(torch.einsum("oc,bchw->bohw", layer.fc1.weight[..., 0, 0], x) + layer.fc1.bias[:, None, None])
    assert hidden.shape[1] == 21
    hidden = hidden + layer.dwconv(hidden)
    expected = torch.einsum("oc,bchw->bohw", layer.fc2.weight[..., 0, 0], hidden) + layer.fc2.bias[:, None, None]
    assert_close(layer(x), expected)
