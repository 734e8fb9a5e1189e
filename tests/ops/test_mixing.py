"""Attention by blocks against its matrix of scores in float64, and against the released MHLA."""

import zlib

import numpy as np
import pytest
import torch
from golden_networks import golden
from torch.testing import assert_close

from linvit.layers.grid import after_prefix
from linvit.ops import attention_scores, linear_attention, rotary_1d, rotary_2d
from linvit.ops.mixing import blocks_of_grid, initial_mixing, resized_mixing

RECORDS = golden("mechanisms_2026")
GRIDS = {  # height and width, rows and columns of blocks, tokens before the grid
    "equal blocks": ((4, 6), (2, 3), 0),
    "ragged blocks": ((7, 5), (3, 2), 0),
    "class token": ((7, 5), (3, 2), 1),
    "two tokens before the grid": ((9, 6), (3, 3), 2),
    "fewer rows than blocks": ((2, 3), (4, 4), 0),
    "one token": ((1, 1), (1, 1), 0),
}
RULES = [
    ({}, "divide"),
    ({"normalizer": "magnitude"}, "magnitude"),
    ({"normalizer": "sum", "feature_map": "relu_eps"}, "sum"),
    ({"normalizer": "subtract", "weighting": "query_mean", "feature_map": "identity"}, "subtract, query mean"),
    ({"weighting": "query_mean"}, "query mean"),
    ({"normalizer": "magnitude", "weighting": "query_mean"}, "magnitude, query mean"),
]


def random(*shape, seed=0, gradient=True):
    x = torch.from_numpy(np.random.RandomState(seed).standard_normal(shape))
    return x.requires_grad_(gradient)


def matrix(number, heads=None, zeros=False):
    shape = (number, number) if heads is None else (heads, number, number)
    m = random(*shape, seed=7, gradient=False).abs() / number
    if zeros and number > 2:
        m[..., 0, 1] = m[..., 2, 0] = 0
    return m.requires_grad_()


def assert_equal_to_scores(inputs, **options):
    query, key, value, mixing = inputs
    out = linear_attention(query, key, value, mixing=mixing, **options)
    expected = attention_scores(query, key, mixing=mixing, **options) @ value
    weight = random(*out.shape, seed=9, gradient=False)
    given = [out, *torch.autograd.grad((out * weight).sum(), inputs)]
    wanted = [expected, *torch.autograd.grad((expected * weight).sum(), inputs)]
    for got, right in zip(given, wanted, strict=True):
        assert_close(got, right, rtol=1e-10, atol=1e-10 * max(1, right.abs().max().item()))


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("rule", RULES, ids=[name for _, name in RULES])
def test_equals_the_matrix_of_scores(name, rule):
    grid, blocks, prefix = GRIDS[name]
    tokens, number = prefix + grid[0] * grid[1], blocks[0] * blocks[1] + (prefix > 0)
    inputs = *(random(2, 3, tokens, 8, seed=seed) for seed in range(3)), matrix(number, zeros=True)
    where = {"blocks": blocks, "grid": grid}
    assert_equal_to_scores(inputs, **where, **rule[0])
    rotary = after_prefix(rotary_2d(grid, 8, dtype=torch.float64), prefix)
    visible = torch.ones(2, tokens, dtype=torch.bool)
    visible[1, tokens // 2 + 1 :] = False
    per_head = *inputs[:3], matrix(number, heads=3)
    assert_equal_to_scores(per_head, **where, **rule[0], rotary=rotary, key_mask=visible)


@pytest.mark.parametrize("rule", RULES[:2], ids=[name for _, name in RULES[:2]])
def test_packed_sequences_have_blocks_of_their_own(rule):
    number, bounds = torch.tensor([0, 2, 2, 1, 0, 0, 1, 2, 1, 1, 1, 0]), torch.tensor([0, 5, 5, 9, 12])
    query, key, value = (random(1, 2, 12, 8, seed=seed) for seed in range(3))
    inputs, where = (query, key, value, matrix(3)), {"blocks": number, "cu_seqlens": bounds, **rule[0]}
    assert_equal_to_scores(inputs, **where)
    out = linear_attention(*inputs[:3], mixing=inputs[3], **where)
    alone = [x[:, :, 5:9] for x in inputs[:3]]
    assert_close(out[:, :, 5:9], linear_attention(*alone, mixing=inputs[3], blocks=number[5:9], **rule[0]))


@pytest.mark.parametrize("causal", [True, "block"])
@pytest.mark.parametrize(("tokens", "size"), [(150, 64), (33, 8), (7, 16)])
@pytest.mark.parametrize("weighting", ["uniform", "prefix_query_mean"])
def test_causal_blocks_equal_the_matrix_of_scores(causal, tokens, size, weighting):
    inputs = *(random(2, 3, tokens, 8, seed=seed) for seed in range(3)), matrix(-(-tokens // size) + 1)
    form = {"causal": causal, "block_size": size, "weighting": weighting}
    rotary = rotary_1d(tokens, 8, dtype=torch.float64)
    assert_equal_to_scores(inputs, **form, normalizer="magnitude", rotary=rotary)
    visible = torch.arange(tokens) % 3 > 0
    assert_equal_to_scores(inputs, **form, key_mask=visible.expand(2, -1))


def test_equal_entries_change_nothing():
    query, key, value = (random(2, 3, 35, 8, seed=seed, gradient=False) for seed in range(3))
    plain = linear_attention(query, key, value, normalizer="magnitude")
    same = torch.full((6, 6), 0.3, dtype=torch.float64)
    mixed = linear_attention(query, key, value, normalizer="magnitude", mixing=same, blocks=(3, 2), grid=(7, 5))
    assert_close(mixed, plain, rtol=1e-12, atol=1e-12)


def test_a_block_that_is_chosen_may_have_almost_no_weight():
    """Exponents of RALA's weights differ by thousands between blocks; a row that reads the light one reads it whole."""
    query, key = torch.ones(1, 1, 4, 4, dtype=torch.float32), torch.tensor([1.0, 1, 4000, 4000])
    value = torch.tensor([1.0, 3, 50, 70]).view(1, 1, 4, 1).expand(-1, -1, -1, 4).contiguous()
    mixing = torch.eye(2).requires_grad_()
    out = linear_attention(
        query,
        key.view(1, 1, 4, 1).expand(-1, -1, -1, 4).contiguous(),
        value,
        feature_map="identity",
        weighting="query_mean",
        mixing=mixing,
        blocks=(1, 2),
        grid=(1, 4),
    )
    assert_close(out[0, 0, :, 0], torch.tensor([2.0, 2, 60, 60]), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert mixing.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_near_as_its_inputs(dtype):
    query, key, value = (random(1, 2, 35, 16, seed=seed, gradient=False).to(dtype) for seed in range(3))
    where = {"mixing": matrix(6).detach().float(), "blocks": (3, 2), "grid": (7, 5), "normalizer": "magnitude"}
    out = linear_attention(query, key, value, **where)
    assert out.dtype == dtype
    exact = linear_attention(query.double(), key.double(), value.double(), **where)
    assert_close(out.double(), exact, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps * 0.1)


def released_mixing(number):
    noise = np.random.RandomState(zlib.crc32(b"mixing_matrix")).standard_normal((number, number))
    return torch.from_numpy(np.abs(noise) / number)


def assert_as_released(out, leaves, record, suffix, atol):
    expected = record[f"output{suffix}"]
    values = torch.tensor(expected["value"], dtype=torch.float64)
    assert_close(out.flatten()[expected["index"]], values, rtol=1e-9, atol=atol)
    out.mul(random(*out.shape, seed=3, gradient=False)).sum().backward()
    norms = [x.grad.norm().item() for x in leaves]
    assert_close(norms, list(record[f"gradient_norms{suffix}"].values()), rtol=1e-9, atol=0)


def eq_4(num, den, mass, scale, eps):
    """eps in Eq. 4 is added to a sum, not to a mean."""
    gain = 1 / (den + eps / mass)
    return gain, num * gain


@pytest.mark.parametrize("name", ["mhla_operator_4x6", "mhla_operator_9x6"])
def test_equals_equation_4_of_the_released_operator(name):
    record = RECORDS[name]
    grid, blocks = ((4, 6), (2, 3)) if name.endswith("4x6") else ((9, 6), (3, 3))
    inputs = [random(*record["input_shape"], seed=seed) for seed in range(3)]
    number = blocks[0] * blocks[1]
    mixing = released_mixing(number).requires_grad_()
    out = linear_attention(
        *inputs, feature_map="relu_eps", normalizer=eq_4, mixing=mixing, blocks=blocks, grid=grid, eps=1e-6
    )
    assert_as_released(out, (*inputs, mixing), record, "_with_equation_4", atol=1e-10)
    start = torch.tensor(record["initial_mixing"], dtype=torch.float64)
    assert_close(initial_mixing(blocks), start.view(-1, number)[:number], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mhla_causal_150", "mhla_causal_96"])
def test_equals_the_released_causal_chunks(name):
    record = RECORDS[name]
    inputs = [random(*record["input_shape"], seed=seed) for seed in range(3)]
    number = record["mixing_shape"][0]
    mixing = released_mixing(number).tril().requires_grad_()

    def undivided(num, den, mass, scale, eps):
        return (mass * scale).expand_as(den), mass * scale * num

    query, key, value = (x.transpose(1, 2) for x in inputs)
    out = linear_attention(
        query, key, value, feature_map="relu", normalizer=undivided, causal=True, block_size=64, mixing=mixing
    ).transpose(1, 2)
    assert_as_released(out, (*inputs, mixing), record, "", atol=1e-9)


@pytest.mark.parametrize(("grid", "blocks"), [((14, 14), (4, 4)), ((7, 5), (3, 2)), ((2, 9), (3, 4))])
def test_blocks_of_a_grid_are_rectangles_of_about_equal_sides(grid, blocks):
    number = blocks_of_grid(grid, blocks, 0).of_token().view(grid)
    for axis, (length, count) in enumerate(zip(grid, blocks, strict=True)):
        bounds = [i * length // count for i in range(count + 1)]
        rows = torch.tensor([max(i for i in range(count) if bounds[i] <= place) for place in range(length)])
        along = number // blocks[1] if axis == 0 else number % blocks[1]
        assert (along == (rows[:, None] if axis == 0 else rows)).all()


def test_a_resized_matrix_keeps_its_columns_sums_and_its_smoothness():
    mixing = initial_mixing((4, 4), prefix=True)
    larger = resized_mixing(mixing, (4, 4), (8, 6))
    assert larger.shape == (49, 49)
    assert_close(larger.sum(0), torch.ones(49, dtype=torch.float64))
    first = larger[1:, 1].view(8, 6)  # what reads the block in a corner most is that block
    assert first.argmax() == 0
    assert (first.diff(dim=0) <= 1e-12).all()
    assert (first.diff(dim=1) <= 1e-12).all()


WRONG = {
    "`blocks` is given without `mixing`": {"blocks": (2, 3)},
    "`mixing` has 6 blocks, expected 2 × 2": {"mixing": torch.ones(6, 6), "blocks": (2, 2), "grid": (4, 6)},
    "2 × 3 and one for the tokens before": {"mixing": torch.ones(6, 6), "blocks": (2, 3), "grid": (4, 5)},
    "expected at most 24 tokens": {"mixing": torch.ones(6, 6), "blocks": (2, 3), "grid": (5, 5)},
    r"floating point of shape \(blocks, blocks\)": {"mixing": torch.ones(6, 5), "blocks": (2, 3), "grid": (4, 6)},
    "two whole numbers of 1 or more": {"mixing": torch.ones(6, 6), "blocks": (2, 0), "grid": (4, 6)},
    r"`grid` is None, expected rows and columns": {"mixing": torch.ones(6, 6), "blocks": (2, 3)},
    "numbers from 0 to 6, expected 0 to 5": {"mixing": torch.ones(6, 6), "blocks": torch.arange(24) % 7},
    r"expected int32 or int64 of shape \(24,\)": {"mixing": torch.ones(6, 6), "blocks": torch.zeros(23).long()},
    "6 blocks of 3 tokens, expected enough for 24": {"mixing": torch.ones(6, 6), "causal": True, "block_size": 3},
    "`block_size` is of type|`block_size` is None": {"mixing": torch.ones(6, 6), "causal": True},
    "`grid` is given with `mixing` and causal=True": {
        **{"mixing": torch.ones(6, 6), "causal": True, "block_size": 4, "grid": (4, 6)}
    },
    "`backend` is 'cpp', which cannot run": {
        **{"mixing": torch.ones(6, 6), "blocks": (2, 3), "grid": (4, 6), "backend": "cpp", "weighting": "query_mean"}
    },
}


@pytest.mark.parametrize("sentence", WRONG, ids=range(len(WRONG)))
def test_a_wrong_call_gets_one_sentence(sentence):
    x = torch.randn(1, 2, 24, 8)
    with pytest.raises(ValueError, match=sentence):
        linear_attention(x, x, x, **WRONG[sentence])
