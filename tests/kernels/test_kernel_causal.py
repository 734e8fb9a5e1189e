import pytest
import torch
from kernel_judge import judge
from test_kernel_packed import KERNEL, one_after_another, pack
from tiers import slow

from linvit.bench.exactness import deviations_in_bfloat16
from linvit.ops import rotary_1d


def draw(device, tokens=40, width=16, value_width=24, batch=1, heads=1):
    query, key = (torch.randn(batch, heads, tokens, width, device=device) for _ in range(2))
    return query, key, torch.randn(batch, heads, tokens, value_width, device=device)


@pytest.mark.parametrize("rotated", [True, *slow(False)])
@pytest.mark.parametrize("normalizer", ["magnitude", *slow("divide", "subtract", "none", "sum")])
def test_normalizers(device, tiled, normalizer, rotated):
    tiled(rows=16, processors=1)
    rotary = rotary_1d(40, 16, device=device) if rotated else None
    judge(draw(device), normalizer=normalizer, rotary=rotary, causal=True)


@pytest.mark.parametrize("maps", [*slow("relu", "exp", "identity"), ("relu", "elu1")])
def test_feature_maps(device, maps):
    judge(draw(device), feature_map=maps, normalizer="subtract", causal=True)


@pytest.mark.parametrize(
    ("width", "value_width"),
    [
        (17, 17),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((48, 20), (24, 80), (64, 64), (128, 128))),
    ],
)
def test_head_widths(device, width, value_width):
    judge(draw(device, 33, width, value_width), normalizer="magnitude", causal=True)


@pytest.mark.parametrize("tokens", [1, *slow(16), 17])
def test_numbers_of_tokens(device, tiled, tokens):
    tiled(rows=16, processors=1)
    judge(
        draw(device, tokens, batch=min(tokens, 2), heads=min(tokens, 2)),
        rotary=rotary_1d(tokens, 16, device=device),
        causal=True,
    )


@pytest.mark.parametrize("normalizer", ["subtract", *slow("divide", "magnitude")])
def test_key_mask_hides_even_what_is_not_a_number(device, tiled, normalizer):
    tiled(rows=16, processors=1)
    mask = torch.rand(3, 20, device=device) > 0.4
    mask[0], mask[1, :18], mask[2, :5] = False, False, False  # one entry sees nothing, two nothing at first
    query, key, value = draw(device, tokens=20, batch=3)
    key[:, 0][~mask], value[:, 0][~mask] = float("nan"), float("inf")
    rotary = rotary_1d(20, 16, device=device)
    judge((query, key, value), key_mask=mask, rotary=rotary, normalizer=normalizer, causal=True)


@pytest.mark.slow
def test_values_far_from_zero(device, tiled):
    tiled(rows=16, processors=1)
    query, key, value = draw(device)
    judge((query, key, value + 3), normalizer="magnitude", causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_half_precision_is_rounded_once(device, dtype):
    if device.type == "cuda" and dtype == torch.bfloat16:
        pytest.skip("on a GPU bfloat16 is multiplied as it is: see the gpu tests")
    judge(draw(device), dtype, rotary=rotary_1d(40, 16, device=device), causal=True)


@pytest.mark.slow
def test_packed_sequences(device, tiled):
    tiled(rows=16, processors=1)
    tensors, rotary, cu_seqlens = pack(device, [(7, 5), (1, 1), (0, 4), (3, 6)], heads=2)
    options = {"cu_seqlens": cu_seqlens, "rotary": rotary, "normalizer": "magnitude", "causal": True}
    judge(tensors, kernel=KERNEL, twin=one_after_another, **options)


@pytest.mark.slow
def test_strides(device, tiled):
    tiled(rows=16, processors=1)
    parts = torch.randn(2, 40, 3 * 2 * 16, device=device).chunk(3, dim=-1)
    judge([x.unflatten(-1, (2, 16)).transpose(1, 2) for x in parts], causal=True)


@pytest.mark.parametrize("block", [5, *slow(1, 16), 17, *slow(40, 100)])
@pytest.mark.parametrize("normalizer", ["magnitude", *slow("divide", "subtract", "none", "sum")])
@pytest.mark.parametrize("masked", [*slow(False), True])
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
def test_blocks(device, tiled, block, normalizer, masked, dtype):
    """Of a few tokens, computed in chunks, and of more, which have a state each."""
    tiled(rows=16, processors=2)
    tensors = draw(device, tokens=75, width=24)
    mask = torch.rand(1, 75, device=device) > 0.4
    mask[:, :20] = False  # the first blocks see nothing
    options = {"key_mask": mask if masked else None, "rotary": rotary_1d(75, 24, device=device)}
    options |= {"causal": "block", "block_size": block, "normalizer": normalizer}
    if dtype == torch.float32:
        judge(tensors, **options)
    else:
        for row in deviations_in_bfloat16(tensors, **options):
            assert row.error <= row.allowed, row


@pytest.mark.parametrize("block", [7, 20])
def test_blocks_of_values_far_from_zero(device, tiled, block):
    tiled(rows=16, processors=1)
    query, key, value = draw(device, tokens=70, width=24)
    judge((query, key, value + 3), causal="block", block_size=block, normalizer="magnitude")
