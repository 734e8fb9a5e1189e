"""Tokens summarized and read in blocks, against all at once."""

import itertools
import random
from unittest import mock

import pytest
import torch

from linvit.formulas.feature_map import ACROSS_TOKENS, FEATURE_MAPS
from linvit.formulas.normalizer import NORMALIZERS
from linvit.ops import bidirectional as module
from linvit.ops import linear_attention, mala, rala, rotary_1d, rotary_2d

float64 = torch.float64


def draw(tokens, batch=2, heads=3, width=8, value_width=5, dtype=float64):
    query, key = torch.randn(2, batch, heads, tokens, width, dtype=dtype)
    return query, key, torch.randn(batch, heads, tokens, value_width, dtype=dtype) + 3


def at_once(*inputs, **options):
    with mock.patch.object(module, "BLOCK", 1 << 40), torch.no_grad():
        return linear_attention(*inputs, **options)


def in_blocks(*inputs, numbers, **options):
    """The output, and how often tokens were summarized."""
    with (
        mock.patch.object(module, "BLOCK", numbers),
        mock.patch.object(module, "summarize", wraps=module.summarize) as summarize,
        torch.no_grad(),
    ):
        return linear_attention(*inputs, **options), summarize.call_count


def most_allocated(run):
    """The most bytes of tensors that `run` had at once, as torch's profiler counts them, with its result."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = run()
    assert kept is not None
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert (actual - expected).abs().max() <= 1e-12 * expected.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("tokens", [1, 2, 37])
@pytest.mark.parametrize("images_a_block", [0.2, 1.5])
def test_every_axis_value(tokens, images_a_block):
    query, key, value = draw(tokens, batch=4)
    numbers = max(1, int(images_a_block * tokens)) * 3 * 8
    weightings = ["uniform", "query_mean", torch.rand(4, 3, tokens, dtype=float64), torch.rand(tokens, dtype=float64)]
    rotaries = [None, rotary_1d(tokens, 8, dtype=float64)]
    masks = [None, torch.rand(4, tokens) > 0.3]
    combinations = list(itertools.product(weightings, NORMALIZERS, rotaries, masks))
    for weighting, normalizer, rotary, mask in random.Random(tokens).sample(combinations, 40):
        options = {"weighting": weighting, "normalizer": normalizer, "rotary": rotary, "key_mask": mask}
        out, summaries = in_blocks(query, key, value, numbers=numbers, **options)
        assert summaries > 1
        assert_same(out, at_once(query, key, value, **options))


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_every_feature_map(name):
    query, key, value = draw(21)
    out, summaries = in_blocks(query, key, value, numbers=100, feature_map=("elu1", name), normalizer="sum")
    assert (summaries == 1) == (name in ACROSS_TOKENS)
    assert_same(out, at_once(query, key, value, feature_map=("elu1", name), normalizer="sum"))


def test_a_map_of_unknown_reach_sees_all_tokens():
    query, key, value = draw(21)
    _, summaries = in_blocks(query, key, value, numbers=100, feature_map=lambda x: x.softmax(-2))
    assert summaries == 1


@pytest.mark.parametrize("queries", [1, 5, 60])
def test_other_queries_than_keys(queries):
    _, key, value = draw(23)
    query = torch.randn(2, 3, queries, 8, dtype=float64)
    out, summaries = in_blocks(query, key, value, numbers=200, weighting="query_mean")
    assert summaries > 1
    assert_same(out, at_once(query, key, value, weighting="query_mean"))


def test_a_head_and_its_mask_and_tokens_that_nobody_may_see():
    query, key, value = draw(30)
    mask = torch.rand(2, 3, 30) > 0.4
    mask[0, 1] = False
    for weighting in ("uniform", "query_mean"):
        dirty = [x.masked_fill(~mask.unsqueeze(-1), torch.nan) for x in (key, value)]
        out, _ = in_blocks(query, *dirty, numbers=150, weighting=weighting, key_mask=mask)
        assert_same(out, at_once(query, key, value, weighting=weighting, key_mask=mask))
        assert out[0, 1].eq(0).all()


def test_weights_of_any_size_stay_finite():
    query, key, value = (60 * x for x in draw(300))
    out, _ = in_blocks(query, key, value, numbers=700, weighting="query_mean")
    assert_same(out, at_once(query, key, value, weighting="query_mean"))
    out, _ = in_blocks(query.float(), key.float(), value.float(), numbers=700, weighting="query_mean")
    assert out.isfinite().all()


@pytest.mark.parametrize("preset", [rala, mala])
def test_any_strides(preset):
    height, width = 14, 9
    packed = torch.randn(2, 3 * 24, height, width, dtype=float64)
    rotary = rotary_2d((height, width), 8, dtype=float64)
    whole = preset(*(x.contiguous() for x in packed.reshape(2, 3, 3, 8, -1).mT.unbind(1)), rotary=rotary)
    for x in (packed, packed.to(memory_format=torch.channels_last)):
        for numbers in (500, 126 * 24):
            with mock.patch.object(module, "BLOCK", numbers), torch.no_grad():
                assert_same(preset(*x.reshape(2, 3, 3, 8, -1).mT.unbind(1), rotary=rotary), whole)


def test_the_output_of_a_map_with_its_channels_last_is_one_too():
    query, key, value = torch.randn(3, 2, 30, 24).unflatten(-1, (3, 8)).transpose(2, 3)
    out, _ = in_blocks(query, key, value, numbers=100)
    assert out.transpose(1, 2).is_contiguous()
    out, _ = in_blocks(query.contiguous(), key, value, numbers=100)
    assert out.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_arithmetic_is_float32_arithmetic_rounded_once(dtype):
    query, key, value = (x.to(dtype) for x in draw(300))
    for options in ({"weighting": "query_mean"}, {"normalizer": "magnitude"}):
        wide, _ = in_blocks(query.float(), key.float(), value.float(), numbers=1000, **options)
        out, _ = in_blocks(query, key, value, numbers=1000, **options)
        assert torch.equal(out, wide.to(dtype))


def test_transforms_and_forward_derivatives():
    query, key, value = draw(12, batch=1)
    several = torch.randn(4, 1, 3, 12, 5, dtype=float64)
    with mock.patch.object(module, "BLOCK", 60), torch.no_grad():
        by_value = torch.func.vmap(lambda v: rala(query, key, v))(several)
        for got, v in zip(by_value, several, strict=True):
            assert_same(got, at_once(query, key, v, weighting="query_mean"))
        _, got = torch.func.jvp(lambda k: rala(query, k, value), (key,), (torch.ones_like(key),))
    _, expected = torch.func.jvp(lambda k: rala(query, k, value), (key,), (torch.ones_like(key),))
    assert_same(got, expected)


def test_gradients_are_computed_from_all_at_once():
    query, key, value = (x.requires_grad_() for x in draw(9))
    with (
        mock.patch.object(module, "BLOCK", 40),
        mock.patch.object(module, "summarize", wraps=module.summarize) as summarize,
    ):
        linear_attention(query, key, value).sum().backward()
        linear_attention(query.detach(), key.detach(), value.detach(), weighting=torch.rand(9).requires_grad_())
    assert summarize.call_count == 2
    assert all(x.grad is not None for x in (query, key, value))


@pytest.mark.parametrize("preset", [rala, mala])
def test_nothing_of_the_inputs_size_is_written_but_the_output(preset):
    tokens, heads, width = 12544, 4, 64
    query, key, value = torch.randn(3, 1, heads, tokens, width)
    rotary = rotary_2d((112, 112), width)
    with torch.inference_mode():
        most = most_allocated(lambda: preset(query, key, value, rotary=rotary))
    assert query.nbytes <= most < 1.5 * query.nbytes
