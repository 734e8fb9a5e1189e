"""Packed sequences and block-causal attention, against the explicit matrix and against each sequence alone."""

import itertools
import sys

import pytest
import torch
from operator_axes import axes, by_matrix, distance, of_some_tokens
from tiers import quick, slow

from linvit.ops import attention_scores, linear_attention, linear_attention_step, rotary_1d

LENGTHS = (70, 1, 0, 129, 64, 3, 150)
CHUNKED = {"causal": False, "chunked": True}  # as on a GPU; on a CPU there is a loop over the sequences
FORMS = [
    {"causal": False},
    CHUNKED,
    {"causal": True},
    *({"causal": "block", "block_size": size} for size in (3, 64, 100)),
]


@pytest.fixture
def form(request, monkeypatch):
    """Options that say what a token sees."""
    options = dict(request.param)
    if options.pop("chunked", False):
        monkeypatch.setattr(sys.modules["linvit.ops.linear_attention"], "at_hand", lambda cu_seqlens: False)
    return options


def draw(tokens, width=8, value_width=5, batch=1, heads=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    sizes = (width, width, value_width)
    return [torch.randn(batch, heads, tokens, size, generator=generator, dtype=dtype) for size in sizes]


def bounds(lengths=LENGTHS, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def one_after_another(tensors, cu_seqlens, **options):
    outs = []
    for begin, end in itertools.pairwise(cu_seqlens.tolist()):
        if end > begin:
            now = slice(begin, end)
            outs.append(linear_attention(*(x[:, :, now] for x in tensors), **of_some_tokens(options, now)))
    return torch.cat(outs, dim=2)


@pytest.mark.parametrize("form", quick(FORMS, FORMS[:3]), indirect=True, ids=str)
def test_packed_sequences_are_each_alone(form):
    cu_seqlens, tokens = bounds(), sum(LENGTHS)
    tensors = draw(tokens)
    for options in axes(tokens, causal=form["causal"], sampled=30):
        out = linear_attention(*tensors, cu_seqlens=cu_seqlens, **{**options, **form})
        assert distance(out, one_after_another(tensors, cu_seqlens, **{**options, **form})) < 1e-12


@pytest.mark.parametrize("form", quick(FORMS, FORMS[:3]), indirect=True, ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_the_matrix(form, packed):
    tokens = sum(LENGTHS) if packed else 210
    tensors = draw(tokens, batch=1 if packed else 2)
    for options in axes(tokens, batch=tensors[0].shape[0], causal=form["causal"], sampled=30):
        options = {**options, **form, "cu_seqlens": bounds(dtype=torch.int64) if packed else None}
        assert distance(linear_attention(*tensors, **options), by_matrix(*tensors, **options)) < 1e-12


@pytest.mark.parametrize("form", FORMS, indirect=True, ids=str)
def test_no_sequence_sees_another(form):
    query, key, _ = draw(90)
    scores = attention_scores(query, key, cu_seqlens=bounds((20, 70)), **form)
    assert scores[..., :20, 20:].eq(0).all()
    assert scores[..., 20:, :20].eq(0).all()
    assert scores[..., 20:, 20].ne(0).all()


@pytest.mark.parametrize("form", FORMS, indirect=True, ids=str)
@pytest.mark.parametrize("normalizer", ["magnitude", *slow("divide", "subtract")])
def test_gradients_are_those_of_the_matrix(form, normalizer):
    tokens = sum(LENGTHS)
    tensors = [x.requires_grad_() for x in draw(tokens)]
    means = "prefix_query_mean" if form["causal"] else "query_mean"
    options = {"weighting": means, "normalizer": normalizer, "cu_seqlens": bounds(), **form}
    options["rotary"] = rotary_1d(tokens, 8, dtype=torch.float64)
    direction = torch.randn(1, 2, tokens, 5, dtype=torch.float64)
    wanted = torch.autograd.grad((by_matrix(*tensors, **options) * direction).sum(), tensors)
    given = torch.autograd.grad((linear_attention(*tensors, **options) * direction).sum(), tensors)
    for x, y in zip(given, wanted, strict=True):
        assert distance(x, y) < 1e-12


@pytest.mark.parametrize("form", FORMS[:3], indirect=True, ids=str)
def test_gradcheck(form):
    tensors = [x.requires_grad_() for x in draw(7, width=4, value_width=3, heads=1)]
    means = "prefix_query_mean" if form["causal"] else "query_mean"

    def packed(*tensors):
        return linear_attention(*tensors, weighting=means, cu_seqlens=bounds((3, 4)), **form)

    assert torch.autograd.gradcheck(packed, tensors)


@pytest.mark.parametrize("weighting", ["uniform", "prefix_query_mean"])
def test_blocks_of_one_token_are_causal_and_one_block_is_bidirectional(weighting):
    tensors = draw(130)
    options = {"weighting": weighting, "normalizer": "magnitude"}
    by_token = linear_attention(*tensors, causal="block", block_size=1, **options)
    assert torch.equal(by_token, linear_attention(*tensors, causal=True, **options))
    options["weighting"] = weighting.removeprefix("prefix_")
    expected = linear_attention(*tensors, **options)
    for size in (130, 10**6):
        whole = linear_attention(*tensors, causal="block", block_size=size, **{**options, "weighting": weighting})
        assert distance(whole, expected) < 1e-12


@pytest.mark.parametrize("size", [*slow(1, 5), 64, 90])
def test_a_block_at_a_time_equals_all_at_once(size):
    tensors = draw(200, batch=2)
    for options in axes(200, batch=2, causal="block", sampled=30):
        options["block_size"] = size
        by_block = linear_attention(*tensors, **options)
        assert options.pop("causal") == "block"
        whole, end = linear_attention_step(*tensors, **options)
        assert distance(whole, by_block) < 1e-12
        state, outs = None, []
        for start in range(0, 200, size):
            now = slice(start, start + size)
            out, state = linear_attention_step(*(x[:, :, now] for x in tensors), state, **of_some_tokens(options, now))
            outs.append(out)
        assert distance(torch.cat(outs, dim=2), whole) < 1e-12
        for name in ("S", "z", "u", "r", "query", "num_queries"):
            assert distance(getattr(state, name), getattr(end, name)) < 1e-11
        break_even = [s.n.log() + s.shift for s in (state, end)]
        torch.testing.assert_close(*break_even, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS, indirect=True, ids=str)
def test_lower_precision_loses_no_more_than_each_sequence_alone(dtype, form):
    lengths = (500, 40, 900, 200)
    tensors = [x.to(dtype) for x in draw(sum(lengths), width=32, value_width=32)]
    means = "prefix_query_mean" if form["causal"] else "query_mean"
    for options in ({"weighting": means}, {"normalizer": "magnitude", "weighting": "uniform"}):
        options = {**options, **form, "rotary": None, "key_mask": None}
        exact = one_after_another([x.double() for x in tensors], bounds(lengths), **options)
        alone = one_after_another(tensors, bounds(lengths), **options)
        out = linear_attention(*tensors, cu_seqlens=bounds(lengths), **options)
        assert out.dtype == dtype
        assert (out - exact).norm() <= 1.5 * (alone - exact).norm()


@pytest.mark.parametrize("form", FORMS, indirect=True, ids=str)
def test_one_sequence_with_large_weights_does_not_hide_another(form):
    lengths = (80, 80, 80)
    tensors = draw(240)
    tensors[0][:, :, 80:160] *= 60
    tensors[1][:, :, 80:160] *= 60
    options = {"weighting": "prefix_query_mean" if form["causal"] else "query_mean", "rotary": None, **form}
    expected = one_after_another(tensors, bounds(lengths), key_mask=None, **options)
    out = linear_attention(*tensors, cu_seqlens=bounds(lengths), **options)
    for now in (slice(0, 80), slice(80, 160), slice(160, 240)):
        assert distance(out[:, :, now], expected[:, :, now]) < 1e-12


@pytest.mark.parametrize("form", FORMS[:3], indirect=True, ids=str)
def test_time_and_memory_are_those_of_the_tokens(form):
    """Many short sequences beside a long one are not padded to its length."""
    lengths = (4096, *[10] * 100)
    tensors = draw(sum(lengths), heads=1)
    numbers = 0

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal numbers
            out = func(*args, **(kwargs or {}))
            numbers = max(numbers, *(x.numel() for x in torch.utils._pytree.tree_leaves(out) if hasattr(x, "numel")), 0)
            return out

    with Counting():
        linear_attention(*tensors, cu_seqlens=bounds(lengths), **form)
    assert numbers < 3 * sum(lengths) * 64  # chunks of 64 tokens have 64 × 64 numbers at most


@pytest.mark.slow
@pytest.mark.parametrize("form", [FORMS[0], *FORMS[2:]], indirect=True, ids=str)
def test_compiles_as_one_graph(form):
    torch._dynamo.reset()
    means = "prefix_query_mean" if form["causal"] else "query_mean"

    def call(query, key, value, cu_seqlens):
        return linear_attention(query, key, value, cu_seqlens=cu_seqlens, weighting=means, **form)

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for lengths in ((300, 2, 77), (5, 0, 70, 8, 9)):
            inputs = (*draw(sum(lengths)), bounds(lengths))
            torch.testing.assert_close(compiled(*inputs), call(*inputs))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ([0, 3, 7], r"`cu_seqlens` goes from 0 to 7, expected from 0 to 6, the number of tokens"),
        ([1, 3, 6], r"`cu_seqlens` goes from 1 to 6, expected from 0 to 6"),
        ([0, 5, 3, 6], r"`cu_seqlens` decreases from 5 to 3 after entry 1, expected .* in order"),
        ([0], r"`cu_seqlens` is torch.int64 of shape \(1,\), expected int32 or int64 of shape \(sequences \+ 1,\)"),
        ([0.0, 6.0], r"`cu_seqlens` is torch.float32 of shape \(2,\), expected int32"),
        ([[0, 6]], r"`cu_seqlens` is torch.int64 of shape \(1, 2\), expected int32"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(wrong, match):
    query, key, value = draw(6)
    for _ in range(2):  # a valid call of the same form is not checked twice, but its lengths are
        with pytest.raises(ValueError, match=match):
            linear_attention(query, key, value, cu_seqlens=torch.tensor(wrong))
        linear_attention(query, key, value, cu_seqlens=torch.tensor([0] * (len(wrong) - 1 or 1) + [6]))
    with pytest.raises(ValueError, match=match):
        attention_scores(query, key, cu_seqlens=torch.tensor(wrong))


def refused(match, error=ValueError, tensors=None, **options):
    with pytest.raises(error, match=match):
        linear_attention(*(tensors or draw(6)), **options)


def test_what_packed_sequences_do_not_go_with_is_refused():
    whole = torch.tensor([0, 6])
    refused("expected .1, heads, tokens, width. with equally many", tensors=draw(6, batch=2), cu_seqlens=whole)
    refused("no `cu_seqlens` and no `shard`: use an elementwise one", feature_map="softmax_tokens", cu_seqlens=whole)
    refused("`cu_seqlens` is on meta", cu_seqlens=whole.to("meta"))


def test_blocks_that_do_not_fit_are_refused():
    for wrong, shown in ((None, "None"), (0, "0"), (-3, "-3"), (2.0, "of type float")):
        match = f"`block_size` is {shown} with causal='block', expected a whole number of 1 or more"
        refused(match, causal="block", block_size=wrong)
    refused("`block_size` is 4 with causal=True, expected None: pass causal='block'", causal=True, block_size=4)
    refused("`causal` is 'blocks', expected True, False or 'block'", causal="blocks", block_size=4)
    refused("no causal form", causal="block", block_size=4, weighting="query_mean")
