from functools import partial

import pytest
import torch
from kernel_judge import judge
from tiers import quick, slow

from linvit.bench.exactness import deviations_in_bfloat16, output_and_gradients
from linvit.kernels import launch
from linvit.ops import Rotary, packed_linear_attention, rotary_1d, rotary_2d, rotary_3d
from linvit.ops import linear_attention as dispatched

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


@pytest.mark.slow
@ONE_PRESET
def test_half_precision_is_rounded_once(device, preset):
    judge(draw(device, tokens=49, heads=1), torch.float16, rotary=rotary_1d(49, 24, device=device), **preset)


def judge_bfloat16(tensors, **options):
    for row in deviations_in_bfloat16(tensors, **options):
        assert row.error <= row.allowed, row


@pytest.mark.parametrize("mean", [0, *slow(3), 100])
@pytest.mark.parametrize("rotated", [False, True])
@ONE_PRESET
def test_bfloat16_stays_near_the_rounding_of_its_inputs(device, tiled, preset, rotated, mean):
    tiled(rows=32, processors=1)
    query, key, value = draw(device, tokens=75)
    rotary = rotary_1d(75, 24, device=device) if rotated else None
    judge_bfloat16((query, key, value + mean), rotary=rotary, **preset)


@pytest.mark.parametrize("waiting", [*slow(False), True])
@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.bfloat16)])
@pytest.mark.parametrize("masked", [*slow(False), True])
@pytest.mark.parametrize("packed", [*slow(False), True])
@ONE_PRESET
def test_one_launch(device, tiled, monkeypatch, preset, packed, masked, dtype, waiting):
    tiled(rows=16, processors=1, at_once=1000)
    monkeypatch.setattr(launch, "WAITING", waiting)
    options = {"rotary": rotary_1d(53, 24, device=device), **preset}
    options["key_mask"] = torch.rand(1, 53, device=device) > 0.4 if masked else None
    options["cu_seqlens"] = torch.tensor([0, 0, 1, 20, 53], device=device) if packed else None
    if dtype == torch.bfloat16:
        judge_bfloat16(draw(device, 53), **options)
    else:
        judge(draw(device, 53), **options)
        out = dispatched(*draw(device, 53), backend="triton", **options)  # without states
        assert out.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [16, 17, 48, 128])
@pytest.mark.parametrize("weighting", ["uniform", "query_mean"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_bfloat16_everywhere(device, tiled, normalizer, weighting, width, masked, packed):
    if (normalizer, weighting) == ("sum", "query_mean"):
        pytest.skip("has no kernel")
    tiled(rows=16, processors=1)
    for rotated in {False, width % 2 == 0}:
        options = {"normalizer": normalizer, "weighting": weighting}
        options["rotary"] = rotary_1d(53, width, device=device) if rotated else None
        options["key_mask"] = torch.rand(1, 53, device=device) > 0.4 if masked else None
        options["cu_seqlens"] = torch.tensor([0, 0, 6, 20, 53], device=device) if packed else None
        judge_bfloat16(draw(device, 53, width, 24, heads=1), **options)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("preset", [{}, *slow(RALA)], ids=str)
def test_a_sequence_of_one_token_in_bfloat16(device, preset, rotated):
    """Its output does not depend on the query: what rounding S leaves of the gradient is small beside its terms."""
    query, key, value = (x.bfloat16().requires_grad_() for x in draw(device, 20, heads=1))
    cu_seqlens = torch.tensor([0, 1, 20], device=device)
    rotary = rotary_1d(20, 24, device=device) if rotated else None
    out = dispatched(query, key, value, backend="triton", cu_seqlens=cu_seqlens, rotary=rotary, **preset)
    out.float().sum().backward()
    mapped = [(torch.nn.functional.elu(x[0, 0, 0].float()) + 1) for x in (query, key)]
    terms = value[0, 0, 0].float().abs().sum() * mapped[1].norm() / (mapped[0] @ mapped[1])
    assert query.grad[0, 0, 0].norm() <= 2**-8 * terms
    torch.testing.assert_close(out[0, 0, 0], value[0, 0, 0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "ends",
    [(0, 200), (200, -200), *(pytest.param(x, marks=pytest.mark.slow) for x in ((300, 301), (-200, 0)))],
    ids=str,
)
@pytest.mark.parametrize("dtype", [*slow(torch.float32), torch.bfloat16])
def test_exponents_that_rise_and_fall(device, tiled, dtype, ends):
    """Of query-mean weights, over more than float32 has room for."""
    tiled(rows=16, processors=1)
    query, key, value = (x.to(dtype) for x in draw(device, tokens=70, width=16, heads=1))
    exponents = torch.linspace(*ends, 70, device=device)
    query = torch.full_like(query, 1.0)
    key = (key + exponents[:, None] / 4).to(dtype)  # the sum over 16 channels over the root of 16
    options = {"feature_map": "identity", "normalizer": "none", **RALA}
    if dtype == torch.bfloat16:
        judge_bfloat16((query, key, value), **options)
    else:
        judge((query, key, value), gradients=False, **options)


@pytest.mark.parametrize("preset", [MALA, *slow({})], ids=str)
@pytest.mark.parametrize("by_head", [*slow(False), True])
@pytest.mark.parametrize("masked", [*slow(False), True])
def test_given_weights_and_their_gradient(device, tiled, preset, by_head, masked):
    tiled(rows=16, processors=2)
    query, key, value = (x.requires_grad_() for x in draw(device, tokens=40, batch=2))
    weights = torch.rand(2, 2, 40, device=device) if by_head else torch.rand(40, device=device)
    weights[..., 3] = 0
    mask = torch.rand(2, 40, device=device) > 0.4 if masked else None
    options = {"weighting": weights.requires_grad_(), "key_mask": mask, "rotary": rotary_1d(40, 24, device=device)}
    grad = torch.randn(2, 2, 40, 24, device=device)
    results = []
    for backend in ("torch", "triton"):
        out = dispatched(query, key, value, backend=backend, **options, **preset)
        results.append([out, *torch.autograd.grad(out, (query, key, value, weights), grad)])
    for plain, kernel in zip(*results, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


def test_the_mass_of_given_weights_has_no_gradient_in_a_kernel(device):
    query, key, value = draw(device, tokens=20, heads=1)
    weights = torch.rand(20, device=device, requires_grad=True)
    with pytest.raises(
        ValueError, match="the normalizer uses the mass, which has no gradient of weights that are given"
    ):
        dispatched(query, key, value, weighting=weights, normalizer="sum", backend="triton")
    judge((query, key, value), weighting=weights.detach(), normalizer="sum")


@pytest.mark.parametrize("preset", [RALA, MALA, *slow({})], ids=str)
def test_gradient_of_a_learned_rotation(device, tiled, preset):
    tiled(rows=16, processors=2)
    tensors, factor = draw(device, tokens=42, width=20, batch=2), torch.tensor(0.7, requires_grad=True)
    grads = []
    for backend in ("torch", "triton"):
        rotary = rotary_2d((6, 7), 20, factor=factor.to(device), device=device)
        out = dispatched(*tensors, rotary=rotary, backend=backend, **preset)
        grads.append(torch.autograd.grad(out.square().sum(), factor, retain_graph=True)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-5)
    free = [torch.rand(42, 10, device=device, requires_grad=True) for _ in range(2)]  # no cosines and sines
    outs = [dispatched(*tensors, rotary=Rotary(*free), backend=b, **preset).square().sum() for b in ("torch", "triton")]
    for plain, kernel in zip(*(torch.autograd.grad(out, free) for out in outs), strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    "options",
    [RALA, {"causal": True}, *slow(MALA, {"causal": "block", "block_size": 40})],
    ids=["rala", "causal", "mala", "blocks"],
)
def test_projections_in_one_tensor_have_one_gradient(device, tiled, options):
    tiled(rows=16, processors=2)
    wide = torch.randn(2, 90, 200, device=device, requires_grad=True)  # a gate beside the three
    factor = None if "causal" in options else torch.tensor(0.7, device=device, requires_grad=True)
    rotary = None if factor is None else rotary_2d((9, 10), 20, factor=factor, device=device)
    mask = torch.rand(2, 90, device=device) > 0.4 if "causal" in options else None
    options = options | {"rotary": rotary, "key_mask": mask, "backend": "triton"}
    packed = wide[..., :120].unflatten(-1, (3, 2, 20))
    inputs = [wide] if factor is None else [wide, factor]
    grad = torch.randn(2, 90, 2, 20, device=device)
    whole = packed_linear_attention(packed, **options)
    parts = dispatched(*packed.permute(2, 0, 3, 1, 4), **options).transpose(1, 2)
    assert whole.is_contiguous()
    assert torch.equal(whole, parts)
    gradients = [torch.autograd.grad(out, inputs, grad, retain_graph=True) for out in (whole, parts)]
    for ours, copied in zip(*gradients, strict=True):
        assert torch.equal(ours, copied)
    steps = []
    node = whole.grad_fn
    while node is not None:
        steps.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    assert not [name for name in steps if name.startswith(("Stack", "Unbind", "Cat"))], steps


@pytest.mark.slow
def test_a_compiler_keeps_packed_projections_whole(device):
    packed = torch.randn(1, 30, 3, 2, 16, device=device, requires_grad=True)

    def attend(x):
        return packed_linear_attention(x, backend="triton", **RALA)

    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(packed)
    out.sum().backward()
    assert torch.equal(out, attend(packed))
