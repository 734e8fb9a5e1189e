import pytest
import torch

from linvit.layers.cache import AttentionCache, KeyValues
from linvit.layers.causal import CausalAttention, CausalConv, Packing
from linvit.layers.mechanisms import at


def test_packing_brings_documents_apart_and_back():
    documents = torch.tensor([[1, 1, 1, 2, 2], [7, 8, 8, 8, 8]])
    x = torch.randn(2, 5, 3)
    packing = Packing(documents)
    rows = packing.apart(x)
    assert rows.shape == (4, 4, 3)
    assert torch.equal(rows[0, :3], x[0, :3])
    assert torch.equal(rows[3], x[1, 1:])
    assert not rows[0, 3:].any()
    assert torch.equal(packing.together(rows, x), x)


def test_a_document_that_goes_on_in_the_next_row_begins_anew_there():
    assert Packing(torch.zeros(3, 4, dtype=torch.long)).shape == (3, 4)


def test_keys_and_values_keep_what_was_appended():
    cache = KeyValues()
    pieces = [torch.randn(2, 3, tokens, 4) for tokens in (1, 5, 1, 1, 9)]
    for piece in pieces:
        keys, values = cache.append(piece, -piece)
    assert torch.equal(keys, torch.cat(pieces, dim=2))
    assert torch.equal(values, -keys)
    assert cache.num_bytes() == 2 * 4 * keys.numel()


def test_the_short_convolution_passes_on_at_first_and_goes_on_from_its_history():
    conv = CausalConv(6, 4)
    x = torch.randn(2, 9, 6)
    assert torch.equal(conv(x)[0], x)
    torch.nn.init.normal_(conv.weight)
    whole = conv(x)[0]
    first, held = conv(x[:, :2])
    second, _ = conv(x[:, 2:], held)
    assert torch.allclose(torch.cat((first, second), 1), whole, atol=1e-6)
    by_hand = sum(conv.weight[:, 0, 3 - back] * x[:, 5 - back] for back in range(4))
    assert torch.allclose(whole[:, 5], by_hand, atol=1e-6)


def test_the_cache_of_a_linear_mechanism_stays_and_that_of_softmax_grows():
    sizes = {}
    for mechanism in at("sequences"):
        attention, cache = CausalAttention(8, 2, mechanism), AttentionCache()
        with torch.no_grad():
            sizes[mechanism] = []
            for tokens in (1, 3, 20):
                attention(torch.randn(1, tokens, 8), cache=cache)
                sizes[mechanism].append(cache.num_bytes())
    softmax = sizes.pop("softmax")
    assert softmax[2] - softmax[1] == 20 * 2 * 8 * 4
    for size in sizes.values():
        assert size[0] == size[1] == size[2]


def test_a_head_too_narrow_to_turn_is_refused():
    with pytest.raises(ValueError, match="the head width is 1, expected a multiple of 2 for RoPE"):
        CausalAttention(8, 8, "mala", rope=True)
