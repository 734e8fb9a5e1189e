import itertools

import pytest
import torch
from operator_axes import NORMALIZERS, axes, by_matrix, distance, of_some_tokens
from tiers import quick, slow
from torch.export import Dim, export

from linvit.ops import (
    State,
    attention_scores,
    linear_attention,
    linear_attention_step,
    mala,
    packed_linear_attention,
    rala,
    rotary_1d,
    rotary_2d,
)

float64 = torch.float64
FEATURE_MAPS = [pytest.param(name, id=name) for name in ("elu1", "relu", "exp", "identity")]
FEATURE_MAPS.append(pytest.param(torch.sigmoid, id="sigmoid"))


def draw(tokens=7, width=8, value_width=5, batch=2, heads=3, dtype=float64):
    query, key = (torch.randn(batch, heads, tokens, width, dtype=dtype) for _ in range(2))
    return query, key, torch.randn(batch, heads, tokens, value_width, dtype=dtype)


def assert_close(actual, expected, tolerance=1e-10):
    assert distance(actual, expected) <= tolerance


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("tokens", [1, 49, 126])
def test_equals_the_matrix(feature_map, tokens):
    query, key, value = draw(tokens)
    for options in axes(tokens, batch=2, heads=3, sampled=None if feature_map == "elu1" else 30):
        # With signed features the row sum comes near zero; the comparison stays, relative to the largest entry.
        expected = by_matrix(query, key, value, feature_map=feature_map, **options)
        assert_close(linear_attention(query, key, value, feature_map=feature_map, **options), expected)


def check_causal_forms(feature_map, tokens, sampled=None):
    query, key, value = draw(tokens, batch=1, heads=2)
    for options in axes(tokens, causal=True, sampled=sampled):
        options["feature_map"] = feature_map
        parallel = by_matrix(query, key, value, **options)
        assert_close(linear_attention(query, key, value, **options), parallel)

        state, recurrent = None, []
        for t in range(tokens):
            now = slice(t, t + 1)
            one = of_some_tokens(options, now)
            del one["causal"]
            out, state = linear_attention_step(query[:, :, now], key[:, :, now], value[:, :, now], state, **one)
            recurrent.append(out)
        assert_close(torch.cat(recurrent, dim=2), parallel)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
@pytest.mark.parametrize("tokens", slow(1, 2, 64, 65, 130))
def test_causal_forms_agree(feature_map, tokens):
    check_causal_forms(feature_map, tokens)


@pytest.mark.parametrize("feature_map", FEATURE_MAPS)
def test_causal_forms_agree_for_few_tokens(feature_map):
    check_causal_forms(feature_map, 1, sampled=8)
    check_causal_forms(feature_map, 2, sampled=20)


def test_causal_forms_agree_beyond_a_chunk():
    check_causal_forms("elu1", 65, sampled=8)  # chunks have 64 tokens


@pytest.mark.parametrize("cuts", quick([(0, 70, 71, 200), (0, 1, 2, 200), (0, 150, 200)], [(0, 70, 71, 200)]))
def test_prefill_in_pieces_equals_the_whole(cuts):
    query, key, value = draw(200)
    for options in axes(200, batch=2, heads=3, causal=True, sampled=30):
        assert options.pop("causal")
        whole, whole_state = linear_attention_step(query, key, value, State.empty(query, value), **options)
        state, pieces = None, []
        for start, stop in itertools.pairwise(cuts):
            now = slice(start, stop)
            part = of_some_tokens(options, now)
            out, state = linear_attention_step(query[:, :, now], key[:, :, now], value[:, :, now], state, **part)
            pieces.append(out)
        assert_close(torch.cat(pieces, dim=2), whole)
        for name in ("S", "z", "u", "r", "query", "num_queries"):
            assert_close(getattr(state, name), getattr(whole_state, name))
        weight = [s.n.log() + s.shift for s in (state, whole_state)]
        torch.testing.assert_close(*weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_matrix(causal):
    inputs = [x.requires_grad_() for x in draw(70, batch=1, heads=2)]
    for options in axes(70, causal=causal, sampled=30):
        expected = by_matrix(*inputs, **options)
        direction = torch.randn_like(expected)
        wanted = torch.autograd.grad((expected * direction).sum(), inputs)
        got = torch.autograd.grad((linear_attention(*inputs, **options) * direction).sum(), inputs)
        for a, b in zip(got, wanted, strict=True):
            assert_close(a, b, 1e-9)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", quick(NORMALIZERS, ["divide", "magnitude"]))
def test_gradcheck(causal, normalizer):
    inputs = [x.requires_grad_() for x in draw(3, width=2, value_width=2, batch=1, heads=1)]
    weights = torch.rand(1, 1, 3, dtype=float64).requires_grad_()
    means = "prefix_query_mean" if causal else "query_mean"
    rotary = rotary_1d(3, 2, dtype=float64)

    def by_name(query, key, value):
        return linear_attention(query, key, value, weighting=means, normalizer=normalizer, rotary=rotary, causal=causal)

    def by_tensor(query, key, value, weights):
        return linear_attention(query, key, value, weighting=weights, normalizer=normalizer, causal=causal)

    assert torch.autograd.gradcheck(by_name, inputs)
    assert torch.autograd.gradcheck(by_tensor, [*inputs, weights])


def test_gradients_flow_through_a_carried_state():
    inputs = [x.requires_grad_() for x in draw(3, width=2, value_width=2, batch=1, heads=1)]

    def in_two_pieces(query, key, value):
        state = State.empty(query, value)
        pieces = []
        for now in (slice(0, 1), slice(1, 3)):
            now_read = (query[:, :, now], key[:, :, now], value[:, :, now])
            out, state = linear_attention_step(*now_read, state, weighting="prefix_query_mean")
            pieces.append(out)
        return torch.cat(pieces, dim=2)

    assert torch.autograd.gradcheck(in_two_pieces, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_zero_weights_have_finite_gradients(causal):
    query, key, value = (x.requires_grad_() for x in draw(6, batch=1))
    weights = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 1.0], dtype=float64).requires_grad_()
    linear_attention(query, key, value, weighting=weights, causal=causal).sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value, weights))


def test_presets_are_the_papers_axes():
    query, key, value = draw(12)
    rotary = rotary_2d((3, 4), 8, dtype=float64)
    torch.testing.assert_close(
        rala(query, key, value, rotary=rotary),
        by_matrix(query, key, value, weighting="query_mean", rotary=rotary),
    )
    torch.testing.assert_close(
        mala(query, key, value, rotary=rotary), by_matrix(query, key, value, normalizer="magnitude", rotary=rotary)
    )


def test_magnitude_of_one_token_is_its_value():
    query, key, value = draw(1)
    torch.testing.assert_close(mala(query, key, value, eps=0), value)
    torch.testing.assert_close(rala(query, key, value, eps=0), value)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("garbage", [1e30, torch.nan, torch.inf])
def test_masked_tokens_do_not_leak(causal, garbage):
    query, key, value = draw(20)
    means = "prefix_query_mean" if causal else "query_mean"
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[:, 15:] = False
    padded = ~mask[:, None, :, None]
    spoiled = [x.masked_fill(padded, garbage).requires_grad_() for x in (query, key, value)]
    uniform = [query.masked_fill(padded, 1e3).requires_grad_(), *spoiled[1:]]  # whose masked queries read, too
    for weighting, dirty in (("uniform", uniform), (means, spoiled)):
        out = linear_attention(*dirty, weighting=weighting, normalizer="magnitude", key_mask=mask, causal=causal)
        short = [x[:, :, :15] for x in (query, key, value)]
        expected = linear_attention(*short, weighting=weighting, normalizer="magnitude", causal=causal)
        torch.testing.assert_close(out[:, :, :15], expected)
        grads = torch.autograd.grad(out[:, :, :15].sum(), dirty)
        assert all(g[:, :, :15].isfinite().all() and g[:, :, 15:].eq(0).all() for g in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_a_query_that_sees_nothing_reads_zeros(causal, normalizer):
    query, key, value = draw(9)
    mask = torch.zeros(2, 9, dtype=torch.bool)
    assert linear_attention(query, key, value, normalizer=normalizer, key_mask=mask, causal=causal).eq(0).all()


def test_mask_may_differ_between_heads():
    query, key, value = draw(9)
    mask = torch.rand(2, 3, 9) > 0.4
    out = linear_attention(query, key, value, key_mask=mask)
    for head in range(3):
        alone = [x[:, head : head + 1] for x in (query, key, value)]
        torch.testing.assert_close(out[:, head : head + 1], linear_attention(*alone, key_mask=mask[:, head]))


@pytest.mark.parametrize("weighting", ["uniform", "prefix_query_mean"])
def test_a_token_changes_nothing_before_it(weighting):
    query, key, value = draw(130)
    options = {"weighting": weighting, "normalizer": "magnitude", "causal": True}
    before = linear_attention(query, key, value, **options)
    changed = [x.clone() for x in (query, key, value)]
    for x in changed:
        x[:, :, 77] += 10
    after = linear_attention(*changed, **options)
    assert torch.equal(after[:, :, :77], before[:, :, :77])
    assert not torch.allclose(after[:, :, 77:], before[:, :, 77:])


def test_prefix_weights_of_any_size_stay_finite():
    query, key, value = (60 * x for x in draw(300))
    options = {"weighting": "prefix_query_mean", "causal": True}
    out = linear_attention(query, key, value, **options)
    assert_close(out, by_matrix(query, key, value, **options))
    assert linear_attention(query.float(), key.float(), value.float(), **options).isfinite().all()


def test_decoding_keeps_the_state_at_one_size():
    query, key, value = draw(6)
    state, sizes = None, set()
    for t in range(6):
        now = slice(t, t + 1)
        _, state = linear_attention_step(query[:, :, now], key[:, :, now], value[:, :, now], state)
        sizes.add(sum(field.numel() for field in state))
    assert sizes == {2 * 3 * (8 * 5 + 3 * 8 + 5 + 3)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [*slow(1, 4), 16])
@pytest.mark.parametrize("tokens", [196, 3136, *slow(12544, 50176)])
def test_half_inputs_lose_no_more_than_their_rounding(dtype, scale, tokens):
    query, key, value = (scale * x for x in draw(tokens, width=64, value_width=64, batch=1, heads=2))
    for preset in (rala, mala, linear_attention):
        exact = preset(query, key, value)
        rounded = [x.to(dtype) for x in (query, key, value)]
        floor = (preset(*(x.float() for x in rounded)).to(dtype) - exact).norm()
        out = preset(*rounded)
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert (out - exact).norm() <= 1.5 * floor


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_arithmetic_is_float32_arithmetic_rounded_once(dtype):
    query, key, value = (x.to(dtype) for x in draw(3136, width=64, value_width=64, batch=1))
    for options in ({}, {"weighting": "query_mean"}, {"normalizer": "magnitude", "causal": True}):
        wide = linear_attention(query.float(), key.float(), value.float(), **options)
        assert torch.equal(linear_attention(query, key, value, **options), wide.to(dtype))


def test_autocast_does_not_reach_the_sums():
    query, key, value = draw(3136, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = rala(query, key, value)
    assert torch.equal(out, rala(query, key, value))


def test_shapes_on_the_meta_device():
    query, key, value = (x.to("meta") for x in draw(9))
    for options in ({"weighting": "query_mean"}, {"causal": True}):
        assert linear_attention(query, key, value, **options).shape == value.shape


class Call(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, query, key, value):
        return linear_attention(query, key, value, **self.options)


CALLS = [
    {"weighting": "query_mean"},
    {"normalizer": "magnitude"},
    {"normalizer": "magnitude", "causal": True},
    {"weighting": "prefix_query_mean", "causal": True},
]


@pytest.mark.parametrize("options", quick(CALLS, CALLS[:1]), ids=str)
def test_compiles_as_one_graph_for_any_number_of_tokens(options):
    torch._dynamo.reset()
    call = Call(**options)
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (130, 5):
        inputs = draw(tokens)
        torch.testing.assert_close(compiled(*inputs), call(*inputs))


@pytest.mark.parametrize("options", quick(CALLS, CALLS[:2]), ids=str)
def test_exports_for_any_number_of_tokens(options):
    call = Call(**options)
    tokens = {2: Dim("tokens", min=2, max=100_000)}
    program = export(
        call,
        draw(130),
        dynamic_shapes=(tokens, tokens, tokens),
        prefer_deferred_runtime_asserts_over_guards=options.get("causal", False),
    )
    for length in (5, 64, 777):
        inputs = draw(length)
        torch.testing.assert_close(program.module()(*inputs), call(*inputs))


def refused(match, *changes, error=ValueError, tokens=6, **options):
    query, key, value = draw(tokens)
    inputs = {"query": query, "key": key, "value": value}
    for name, change in changes:
        inputs[name] = change(inputs[name])
    with pytest.raises(error, match=match):
        linear_attention(**inputs, **options)


def test_combinations_without_a_form_say_what_to_use():
    refused("no causal form.*use weighting='prefix_query_mean'", weighting="query_mean", causal=True)
    refused("is causal: pass causal=True.*'query_mean'", weighting="prefix_query_mean")
    mask = torch.ones(2, 6, dtype=torch.bool)
    refused(
        "8 queries and 6 keys",
        ("query", lambda x: x.repeat(1, 1, 2, 1)[:, :, :8]),
        weighting="query_mean",
        key_mask=mask,
    )


def test_inputs_that_do_not_fit_are_refused():
    refused("expected the same batch, heads and width", ("key", lambda x: x[..., :4]))
    refused("expected the same batch, heads and tokens", ("value", lambda x: x[:, :, :5]))
    refused("`value` is torch.float32 and `query` torch.float64, expected the same", ("value", torch.Tensor.float))
    refused("expected as many queries as keys", ("query", lambda x: x[:, :, :5]), causal=True)
    refused("`backend` is 'triton', which cannot run: .*; use 'auto' or 'torch'", backend="triton")


@pytest.mark.parametrize(
    "options",
    [{"weighting": "query_mean"}, {"causal": True}, {"weighting": torch.linspace(0.1, 1, 7)}],
    ids=["rala", "causal", "given"],
)
def test_projections_in_one_tensor(options):
    projections = torch.randn(2, 7, 3, 2, 8, dtype=float64)
    parts = projections.permute(2, 0, 3, 1, 4)
    assert_close(packed_linear_attention(projections, **options), linear_attention(*parts, **options).transpose(1, 2))
    with pytest.raises(ValueError, match=r"has shape \(2, 7, 6, 8\), expected \(batch, tokens, 3, heads, width\)"):
        packed_linear_attention(projections.flatten(2, 3), **options)


@pytest.mark.parametrize("masked", [False, True])
def test_a_function_gives_the_weights(masked):
    query, key, value = draw()
    mask = torch.tensor([[True] * 7, [True] * 3 + [False] * 4]) if masked else None
    if masked:
        key[1, :, 3:] = torch.nan

    def by_mean(query, key, visible):
        assert (visible is None) is not masked
        return (query.mean(2, keepdim=True) * key * 8**-0.5).sum(-1).softmax(-1)

    weights = by_mean(torch.nn.functional.elu(query) + 1, torch.nn.functional.elu(key.nan_to_num(0)) + 1, mask)
    if masked:  # the mean is over the visible queries where it has a name
        expected = linear_attention(query, key, value, weighting=weights, key_mask=mask)
    else:
        expected = linear_attention(query, key, value, weighting="query_mean")
    assert_close(linear_attention(query, key, value, weighting=by_mean, key_mask=mask), expected)
    scores = attention_scores(query, key, weighting=by_mean, key_mask=mask)
    assert_close(scores @ value, expected)
