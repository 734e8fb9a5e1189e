"""NaLaFormer's attention of maps against the layer for tokens, which equals the released one, and its block."""

import pytest
import torch
from fused_networks import randomised
from torch.testing import assert_close

from linvit.layers import rotary_table
from linvit.layers.grid import Places
from linvit.layers.norm_aware import NormAwareAttention2d, NormAwareBlock
from linvit.layers.recent_mechanisms import NormAwareAttention


@pytest.mark.parametrize("mechanism", ["nala", "softmax"])
def test_the_attention_of_a_map_equals_that_of_its_tokens(mechanism):
    """The layer for tokens equals the released one (tests/layers/test_recent_mechanisms.py)."""
    on_map = randomised(NormAwareAttention2d(16, 2, mechanism, dtype=torch.float64))
    of_tokens = NormAwareAttention(16, 2, "nala", (5, 7), dtype=torch.float64)
    weight, bias = on_map.qkvo.weight.flatten(1), on_map.qkvo.bias
    of_tokens.load_state_dict(
        {
            "qkv.weight": weight[:48],
            "qkv.bias": bias[:48],
            "modulation.weight": weight[48:],
            "modulation.bias": bias[48:],
            "lepe.weight": on_map.lepe.weight,
            "lepe.bias": on_map.lepe.bias,
            "ln.weight": on_map.ln.weight,
            "ln.bias": on_map.ln.bias,
            "proj.weight": on_map.proj.weight.flatten(1),
            "proj.bias": on_map.proj.bias,
        }
    )
    x = torch.randn(2, 16, 5, 7, dtype=torch.float64)
    tokens = x.flatten(2).mT
    expected = of_tokens(tokens)
    if mechanism == "softmax":
        query, key, value = of_tokens.query_key_value(tokens, (5, 7))
        y = on_map.operator(query[..., :8], key[..., :8], value, rotary_table(x, 8))
        places = Places(0, (5, 7))
        expected = of_tokens.projected(
            of_tokens.gated(of_tokens.with_local(y, value, tokens, places), tokens), x, places
        )
    assert_close(on_map(x, rotary_table(x, 8)), expected.mT.unflatten(-1, (5, 7)), rtol=0, atol=1e-12)


def test_the_block_convolves_before_each_half():
    block = randomised(NormAwareBlock(16, 2, "nala", layer_scale=0.5, dtype=torch.float64))
    x = torch.randn(2, 16, 5, 7, dtype=torch.float64)
    middle = x + block.cpe(x)
    middle = middle + block.gamma_1 * block.attn(block.norm1(middle), rotary_table(x, 8))
    middle = middle + block.cpe2(middle)
    expected = middle + block.gamma_2 * block.ffn(block.norm2(middle))
    assert_close(block(x, rotary_table(x, 8)), expected, rtol=0, atol=1e-12)
    without = NormAwareBlock(16, 2, "nala", cpe=False)
    assert without.cpe is without.cpe2 is None
