from functools import partial

import pytest
import torch
from kernel_judge import judge
from tiers import quick, slow

from linvit.bench.exactness import output_and_gradients
from linvit.kernels import launch
from linvit.ops import linear_attention as dispatched
from linvit.ops import rotary_1d, rotary_3d

NORMALIZERS = ["divide", "magnitude", "subtract", "none", "sum"]
RALA = {"weighting": "query_mean"}
MALA = {"normalizer": "magnitude"}
ONE_PRESET = pytest.mark.parametrize("preset", [RALA, *slow(MALA)], ids=["rala", "mala"])


def draw(device, tokens=75, width=24, value_width=24, batch=1, heads=2, queries=None):
    query = torch.randn(batch, heads, queries or tokens, width, device=device)
    key = torch.randn(batch, heads, tokens, width, device=device)
    return query, key, torch.randn(batch, heads, tokens, value_width, device=device)


@pytest.mark.parametrize("normalizer", quick(NORMALIZERS, ["subtract"]))
def test_normalizers(device, tiled, normalizer):
    tiled(rows=64, processors=1)
    judge(draw(device, heads=1), rotary=rotary_1d(75, 24, device=device), normalizer=normalizer)


def test_a_video_of_tokens(device):
    judge(draw(device, tokens=30, width=20, heads=1), rotary=rotary_3d((2, 5, 3), 20, device=device), **RALA)


@pytest.mark.slow
@pytest.mark.parametrize("normalizer", NORMALIZERS[:-1])
def test_query_mean_weights_with_any_normalizer(device, tiled, normalizer):
    tiled(rows=64, processors=1)
    judge(draw(device, heads=1), normalizer=normalizer, rotary=rotary_1d(75, 24, device=device), **RALA)


@pytest.mark.parametrize("maps", ["relu", "exp", "identity", ("relu", "elu1")])
def test_feature_maps(device, maps):
    judge(draw(device, tokens=49, heads=1), feature_map=maps, normalizer="subtract")


@ONE_PRESET
@pytest.mark.parametrize("processors", [*slow(1, 2), 100])
def test_splits_of_the_tokens(device, tiled, preset, processors):
    tiled(rows=16, processors=processors)
    judge(draw(device, tokens=70, heads=1), rotary=rotary_1d(70, 24, device=device), **preset)


@ONE_PRESET
@pytest.mark.parametrize(
    ("width", "value_width"),
    [
        (16, 16),
        (17, 17),
        pytest.param(48, 20, marks=pytest.mark.slow),
        pytest.param(24, 80, marks=pytest.mark.slow),
        pytest.param(64, 64, marks=pytest.mark.slow),
        (128, 128),
    ],
)
def test_head_widths(device, preset, width, value_width):
    rotary = None if width % 2 else rotary_1d(33, width, device=device)
    judge(draw(device, 33, width, value_width, heads=1), rotary=rotary, **preset)


@ONE_PRESET
def test_one_token(device, preset):
    judge(draw(device, tokens=1, batch=2, heads=1), **preset)


@ONE_PRESET
def test_other_number_of_queries(device, tiled, preset):
    tiled(rows=16, processors=4)
    judge(draw(device, tokens=40, heads=1, queries=21), **preset)


@ONE_PRESET
@pytest.mark.parametrize("by_head", [*slow(False), True])
def test_key_mask_hides_even_what_is_not_a_number(device, tiled, preset, by_head):
    tiled(rows=16, processors=4)
    mask = torch.rand(2, 2, 20, device=device) > 0.4 if by_head else torch.rand(2, 20, device=device) > 0.4
    mask[0] = False  # one entry sees nothing
    query, key, value = draw(device, tokens=20, batch=2)
    hidden = ~(mask if by_head else mask[:, None].expand(2, 2, 20))
    key[hidden], value[hidden] = float("nan"), float("inf")
    if preset == RALA:
        query[hidden] = float("nan")
    judge((query, key, value), key_mask=mask, rotary=rotary_1d(20, 24, device=device), **preset)


@ONE_PRESET
def test_exponents_beyond_the_range_of_exp(device, tiled, preset):
    tiled(rows=32, processors=1)
    query, key, value = draw(device, tokens=70, heads=1)
    # One token takes all the weight: the keys' gradient is a rounding error in the twin too.
    judge((16 * query, 16 * key, 16 * value), gradients=False, **preset)


@ONE_PRESET
def test_values_far_from_zero(device, tiled, preset):
    tiled(rows=32, processors=1)
    query, key, value = draw(device, tokens=70, heads=1)
    judge((query, key, value + 3), **preset)


@pytest.mark.parametrize("layout", ["channels_last", *slow("channels_first", "every_other")])
def test_any_strides(device, layout):
    batch, heads, tokens, width = 2, 2, 5, 16
    if layout == "channels_last":
        parts = torch.randn(batch, tokens, 3 * heads * width, device=device).chunk(3, dim=-1)
        tensors = [x.unflatten(-1, (heads, width)).transpose(1, 2) for x in parts]
    elif layout == "channels_first":
        parts = torch.randn(batch, 3 * heads * width, tokens, device=device).chunk(3, dim=1)
        tensors = [x.unflatten(1, (heads, width)).transpose(2, 3) for x in parts]
    else:
        tensors = [torch.randn(batch, heads, 2 * tokens, 2 * width, device=device)[:, :, ::2, 1::2] for _ in range(3)]
    out = dispatched(*tensors, backend="triton", **RALA)
    order = sorted(range(4), key=lambda axis: -tensors[2].stride(axis))
    assert order == sorted(range(4), key=lambda axis: -out.stride(axis))

    contiguous = [x.contiguous() for x in tensors]
    grad = torch.randn_like(contiguous[2])
    leaves = [x.detach().requires_grad_() for x in tensors]
    strided = torch.autograd.grad(dispatched(*leaves, backend="triton", **RALA), leaves, grad)
    expected = output_and_gradients(lambda *x: dispatched(*x, backend="triton", **RALA), contiguous, grad, grad.dtype)
    for actual, same in zip([out, *strided], expected, strict=True):
        assert torch.equal(actual, same)


@ONE_PRESET
def test_the_same_bits_every_time(device, tiled, preset):
    tiled(rows=16, processors=2)
    tensors, grad = draw(device, tokens=20, heads=1), torch.randn(1, 1, 20, 24, device=device)
    kernel = partial(dispatched, backend="triton")
    first, second = (output_and_gradients(kernel, tensors, grad, grad.dtype, **preset) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [*slow(torch.float16), torch.bfloat16])
@ONE_PRESET
def test_half_precision_is_rounded_once(device, dtype, preset):
    if not launch.interpreted() and dtype == torch.bfloat16:
        pytest.skip("on a GPU bfloat16 is multiplied as it is: see the gpu tests")
    judge(draw(device, tokens=49, heads=1), dtype, rotary=rotary_1d(49, 24, device=device), **preset)


def test_gradient_of_some_inputs_alone(device):
    query, key, value = draw(device, tokens=20, heads=1)
    key.requires_grad_()
    (dk,) = torch.autograd.grad(dispatched(query, key, value, backend="triton", **RALA).sum(), key)
    (expected,) = torch.autograd.grad(dispatched(query, key, value, backend="torch", **RALA).sum(), key)
    torch.testing.assert_close(dk, expected)


def test_opaque_to_the_compiler(device):
    tensors = [x.requires_grad_() for x in draw(device, tokens=5, heads=1)]
    attend = torch.compile(lambda *x: dispatched(*x, backend="triton", **RALA) + 1, backend="aot_eager", fullgraph=True)
    plain = torch.autograd.grad(dispatched(*tensors, backend="triton", **RALA).square().sum(), tensors)
    compiled = torch.autograd.grad((attend(*tensors) - 1).square().sum(), tensors)
    for a, b in zip(compiled, plain, strict=True):
        torch.testing.assert_close(a, b)
