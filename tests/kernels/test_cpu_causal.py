"""The causal form of the C++ kernel: output and gradients against the plain form in float64."""

import itertools
import shutil
from functools import partial

import pytest
import torch
from kernel_judge import judge
from tiers import quick, slow

from linvit.kernels import cpu, support
from linvit.ops import linear_attention, rotary_1d

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
KERNEL = partial(linear_attention, backend="cpp")
BLOCKS = (None, 1, 5, 16, 17, 1000)  # of one token, as causal=True; small, large, and longer than the sequence
LENGTHS = (50, 0, 1, 130, 48)


@pytest.fixture(scope="module", autouse=True)
def built():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(tokens, width=16, value_width=24, batch=2, heads=2):
    return [torch.randn(batch, heads, tokens, size) for size in (width, width, value_width)]


def seen(block):
    return {"causal": True} if block is None else {"causal": "block", "block_size": block}


SIZES = list(itertools.product((1, 7, 49, 130), BLOCKS))


@pytest.mark.parametrize(
    "size", quick(SIZES, [(1, None), (7, 5), (49, None), (49, 16), (130, 5), (130, 17), (130, 1000)]), ids=str
)
def test_any_number_of_tokens_in_any_block(size):
    tokens, block = size
    # Divided by itself, one token gives its value, so that query and key have no gradient.
    for normalizer in ("divide", "subtract") if tokens > 1 else ("none", "sum"):
        rotary = rotary_1d(tokens, 16) if normalizer in ("divide", "none") else None
        judge(draw(tokens), kernel=KERNEL, normalizer=normalizer, rotary=rotary, **seen(block))


@pytest.mark.parametrize("block", quick(BLOCKS, [None, 17]))
@pytest.mark.parametrize("normalizer", quick(support.NORMALIZERS, ["magnitude", "sum"]))
@pytest.mark.parametrize("rotated", [False, True])
def test_the_formula(normalizer, block, rotated):
    rotary = rotary_1d(50, 16) if rotated else None
    for feature_map in ("elu1", ("relu", "exp"), ("identity", "elu1")):
        if normalizer in ("none", "subtract", "sum") or feature_map[0] != "identity":  # no division by zero
            options = {"normalizer": normalizer, "feature_map": feature_map, "rotary": rotary}
            judge(draw(50, batch=1), kernel=KERNEL, **options, **seen(block))


@pytest.mark.parametrize("block", quick(BLOCKS, [None, 17]))
@pytest.mark.parametrize("normalizer", quick(("divide", "magnitude", "subtract"), ["subtract"]))
def test_masked_tokens_may_hold_anything(block, normalizer):
    query, key, value = draw(49, batch=3)
    mask = torch.rand(3, 2, 49) < 0.6
    mask[0], mask[1, :, :20] = False, False  # one entry sees nothing, one nothing at first
    key[~mask], value[~mask] = float("nan"), float("inf")
    options = {"key_mask": mask, "normalizer": normalizer, "rotary": rotary_1d(49, 16), **seen(block)}
    judge((query, key, value), kernel=KERNEL, **options)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = linear_attention(*leaves, backend="cpp", **options)
    gradients = torch.autograd.grad(out.sum(), leaves)
    assert not out[0].any()
    assert not any(x[0].any() for x in gradients)
    assert not any(x[~mask].any() for x in gradients[1:])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("masked", [False, *slow(True)])
def test_packed_sequences(block, masked):
    tokens = sum(LENGTHS)
    options = {"cu_seqlens": torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)}
    options |= {"rotary": rotary_1d(tokens, 16), "normalizer": "magnitude"}
    if masked:
        options["key_mask"] = torch.rand(1, 3, tokens) < 0.6
    tensors = draw(tokens, batch=1, heads=3)
    judge(tensors, kernel=KERNEL, **options, **seen(block))
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = linear_attention(*leaves, backend="cpp", **options, **seen(block))
    of_first = torch.autograd.grad(out[:, :, :50].sum(), leaves)
    assert all(x[:, :, 50:].eq(0).all() and x[:, :, :50].ne(0).any() for x in of_first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_half_precision_is_rounded_once_and_strides_are_any(dtype, order):
    back = torch.tensor(order).argsort().tolist()
    tensors = [x.to(dtype).permute(order).contiguous().permute(back) for x in draw(49)]
    judge(tensors, dtype, kernel=KERNEL, rotary=rotary_1d(49, 16), causal=True)


@pytest.mark.parametrize("widths", quick([(4, 4), (20, 130), (160, 6), (64, 64)], [(20, 130)]), ids=str)
def test_any_head_width(widths):
    width, value_width = widths
    for block in (None, 20):
        judge(draw(49, width, value_width), kernel=KERNEL, rotary=rotary_1d(49, width), **seen(block))


@pytest.mark.parametrize("threads", [1, 3])
def test_equal_inputs_give_equal_results_with_any_number_of_threads(threads):
    tensors, grad, before = draw(200, heads=3), torch.randn(2, 3, 200, 24), torch.get_num_threads()

    def results():
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = linear_attention(*leaves, causal=True, backend="cpp")
        return [out, *torch.autograd.grad(out, leaves, grad)]

    expected = results()
    torch.set_num_threads(threads)
    try:
        assert all(map(torch.equal, results(), expected))
    finally:
        torch.set_num_threads(before)


def test_values_far_from_zero_and_many_tokens_lose_no_digits():
    query, key, value = draw(4096, batch=1, heads=1)
    for block in (None, 100):
        judge((query, key, value), kernel=KERNEL, normalizer="magnitude", **seen(block))
        judge((query, key, value + 100), kernel=KERNEL, normalizer="magnitude", gradients=False, **seen(block))


def test_what_comes_later_is_not_read():
    tensors = draw(40)
    expected = linear_attention(*tensors, causal=True, backend="cpp")[:, :, :33]
    for x in tensors:
        x[:, :, 33:] = float("nan")
    found = linear_attention(*tensors, causal=True, backend="cpp")
    assert torch.equal(found[:, :, :30], expected[:, :, :30])
    assert found[:, :, 33:].isnan().all()


def test_a_compiler_and_an_exporter_keep_it_in_one_graph():
    tensors = [x.requires_grad_() for x in draw(49)]

    def call(*given):
        return linear_attention(*given, causal="block", block_size=5, backend="cpp")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, expected = compiled(*tensors), call(*tensors)
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in (found, expected)]
    assert all(map(torch.equal, *gradients))
