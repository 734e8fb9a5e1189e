"""Softmax attention of short sequences in one launch, beside `scaled_dot_product_attention` of rotated tensors."""

from functools import partial

import pytest
import torch
from kernel_judge import judge
from tiers import slow
from torch import library

from linvit import kernels
from linvit.bench.exactness import deviations_in_bfloat16, output_and_gradients, plain_softmax
from linvit.kernels import launch, softmax_attention, softmax_launch
from linvit.layers.cache import AttentionCache
from linvit.layers.operator import Operator
from linvit.ops import Rotary, backend, rotary_1d, rotary_2d

judged = partial(judge, kernel=softmax_attention, twin=plain_softmax)


def draw(device, tokens=49, width=24, value_width=24, batch=1, heads=1, queries=None):
    """Query, key and value as views of one projection, heads inside tokens."""
    sizes = [heads * size for size in (width, width, value_width, width)]
    packed = torch.randn(batch, max(tokens, queries or tokens), sum(sizes), device=device)
    query, key, value, _ = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in packed.split(sizes, -1))
    return query[:, :, : queries or tokens], key[:, :, :tokens], value[:, :, :tokens]


@pytest.fixture
def few_keys(monkeypatch):
    """Programs that have 64 keys at once backward, and tiles of 16 queries, as if few were many."""
    setting = {width: launch.Setting(16, 4, 1) for width in (16, 32, 64, 128)}
    monkeypatch.setattr(softmax_launch, "FORWARD", dict.fromkeys((64, 128, 256), setting))
    monkeypatch.setattr(softmax_launch, "BACKWARD", {64: setting})
    monkeypatch.setattr(softmax_launch, "processors", lambda device: 1)


@pytest.mark.parametrize(
    ("tokens", "width", "value_width"),
    [
        (49, 24, 40),
        (20, 17, 128),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((196, 64, 64), (256, 128, 128), (63, 16, 16), (129, 96, 16))
        ),
    ],
)
def test_lengths_and_head_widths(device, tokens, width, value_width):
    rotary = None if width % 2 else rotary_1d(tokens, width, device=device)
    judged(draw(device, tokens, width, value_width, batch=2), rotary=rotary)


@pytest.mark.parametrize("width", [24, *slow(128)])
def test_a_grid_of_tokens_in_several_heads(device, width):
    judged(draw(device, 35, width, batch=2, heads=3), rotary=rotary_2d((7, 5), width, device=device))


def test_programs_that_share_queries_and_keys(device, few_keys):
    judged(draw(device, 75), rotary=rotary_1d(75, 24, device=device))


@pytest.mark.parametrize(("queries", "keys"), [(21, 40), pytest.param(40, 21, marks=pytest.mark.slow)])
def test_other_number_of_queries(device, few_keys, queries, keys):
    judged(draw(device, keys, queries=queries))


def test_one_token_is_its_value(device):
    tensors, grad = draw(device, 1), torch.randn(1, 1, 1, 24, device=device)
    rotary = rotary_1d(1, 24, device=device)
    out, dq, dk, dv = output_and_gradients(softmax_attention, tensors, grad, torch.float32, rotary=rotary)
    assert torch.equal(out, tensors[2])
    assert torch.equal(dv, grad)
    assert max(dq.abs().max(), dk.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, *slow(torch.float16)])
def test_key_mask_hides_even_what_is_not_a_number(device, few_keys, dtype):
    query, key, value = (x.contiguous() for x in draw(device, 70, batch=2))
    mask = torch.rand(2, 70, device=device) > 0.4
    mask[0] = False  # one entry sees nothing
    hidden, rotary = ~mask[:, None], rotary_1d(70, 24, device=device)
    key[hidden], value[hidden] = 0, 0
    judged((query, key, value), dtype, rotary=rotary, key_mask=mask)
    grad, call = torch.randn(query.shape, device=device), partial(softmax_attention, rotary=rotary, key_mask=mask)
    expected = output_and_gradients(call, (query, key, value), grad, dtype)
    key[hidden], value[hidden] = float("nan"), float("inf")
    for actual, same in zip(output_and_gradients(call, (query, key, value), grad, dtype), expected, strict=True):
        assert torch.equal(actual, same)
        assert not actual[0].any()


def test_what_is_not_a_number_stays_so(device):
    query, key, value = (x.contiguous() for x in draw(device, 20, batch=2, heads=2))
    query[0, 0, 3], key[1, 1, 5] = float("nan"), float("nan")
    lost = softmax_attention(query, key, value).isnan().all(-1)
    assert lost[0, 0].nonzero().tolist() == [[3]]
    assert lost.sum() == 1 + 20
    assert lost[1, 1].all()


@pytest.mark.parametrize("size", [16, -16])
def test_exponents_beyond_the_range_of_exp(device, size):
    query, key, value = draw(device, 70)
    key = key + 4  # all scores are large, or all of them are small
    judged((abs(query) * size, key, value), gradients=False)


@pytest.mark.parametrize("masked", [*slow(False), True])
@pytest.mark.parametrize(
    ("tokens", "width"), [(49, 24), *(pytest.param(*x, marks=pytest.mark.slow) for x in ((196, 64), (129, 128)))]
)
def test_bfloat16_stays_near_the_rounding_of_its_inputs(device, tokens, width, masked):
    mask = torch.rand(2, tokens, device=device) > 0.4 if masked else None
    options = {"rotary": rotary_1d(tokens, width, device=device), "key_mask": mask}
    for row in deviations_in_bfloat16(
        draw(device, tokens, width, width, batch=2), softmax_attention, plain_softmax, **options
    ):
        assert row.error <= row.allowed, row


@pytest.mark.slow
def test_half_precision_is_rounded_once(device):
    judged(draw(device), torch.float16, rotary=rotary_1d(49, 24, device=device))


def test_any_strides_and_the_same_bits_every_time(device, few_keys):
    tensors = [x.requires_grad_() for x in draw(device, 20, 16, 16, batch=2, heads=2)]
    rotary, grad = rotary_1d(20, 16, device=device), torch.randn(2, 20, 2, 16, device=device).transpose(1, 2)
    call = partial(softmax_attention, rotary=rotary)
    out = call(*tensors)
    assert out.transpose(1, 2).is_contiguous()
    strided = [out, *torch.autograd.grad(out, tensors, grad)]
    contiguous = [x.detach().contiguous() for x in tensors]
    (of_value,) = torch.autograd.grad(call(*contiguous[:2], tensors[2]), tensors[2], grad)
    assert torch.equal(of_value, strided[-1])
    expected = output_and_gradients(call, contiguous, grad.contiguous(), grad.dtype)
    for actual, same in zip(strided, expected, strict=True):
        assert torch.equal(actual, same)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_the_operator_is_as_torch_wants_it(device, keep):
    from linvit.kernels.operator import attend_softmax

    mask = torch.rand(1, 1, 20, device=device) > 0.4
    tensors = [x.detach().requires_grad_(keep) for x in draw(device, 20)]
    library.opcheck(attend_softmax, (*tensors, *rotary_1d(20, 24, device=device), mask, keep))


@pytest.fixture
def chosen(monkeypatch):
    """Calls of the kernel, which is used as if it had passed on this device."""
    calls = []

    def note(*tensors, **options):
        calls.append(options)
        return softmax_attention(*tensors, **options)

    monkeypatch.setattr(backend, "_has_passed", lambda query, which: which == "softmax")
    monkeypatch.setattr(kernels, "softmax_attention", note)
    return calls


@pytest.mark.parametrize("dynamic", [*slow(False), True])
def test_a_compiler_keeps_it_in_one_graph(device, chosen, dynamic):
    operator = Operator("softmax", 1, 24)
    call = torch.compile(operator, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (20, 21):
        tensors, grad = draw(device, tokens), torch.randn(1, 1, tokens, 24, device=device)
        rotary = rotary_1d(tokens, 24, device=device)
        results = (output_and_gradients(each, tensors, grad, grad.dtype, rotary=rotary) for each in (call, operator))
        for actual, same in zip(*results, strict=True):
            assert torch.equal(actual, same)


@pytest.mark.parametrize("mechanism", ["softmax", "softmax_unit_query"])
def test_a_layer_takes_it_where_it_has_passed(device, chosen, mechanism):
    tensors, operator = draw(device, 20, batch=2, heads=2), Operator(mechanism, 2, 24)
    rotary, mask = rotary_1d(20, 24, device=device), torch.rand(2, 20, device=device) > 0.4
    got = operator(*tensors, rotary, key_mask=mask)
    assert len(chosen) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_has_passed", lambda query, which: False)
        torch.testing.assert_close(got, operator(*tensors, rotary, key_mask=mask))
    assert len(chosen) == 1


def test_a_layer_leaves_it_where_it_cannot_be_used(device, chosen):
    operator, tensors, rotary = Operator("softmax", 1, 24), draw(device, 20), rotary_1d(20, 24, device=device)
    operator(*tensors, None)
    operator(*tensors, rotary, bias=torch.zeros(1, 1, 20, 20, device=device))
    operator(*tensors, rotary, cache=AttentionCache())
    operator(*tensors, Rotary(rotary.cos.requires_grad_(), rotary.sin))
    operator(*(x.double() for x in tensors), rotary_1d(20, 24, dtype=torch.float64, device=device))
    operator(*draw(device, 257), rotary_1d(257, 24, device=device))
    Operator("softmax", 1, 24, causal=True)(*tensors, rotary_1d(20, 24, device=device))
    operator.fused = False
    operator(*tensors, rotary_1d(20, 24, device=device))
    operator.fused = True
    query, *others = tensors
    torch.func.grad(lambda x: operator(x, *others, rotary_1d(20, 24, device=device)).sum())(query)
    assert not chosen
