import math

import pytest
import torch

from linvit.ops import attention_scores, linear_attention, rotary_1d

float64 = torch.float64


def formula(query, key, normalizer, weights, angles=None, eps=1e-6):
    """Entries of the matrix by plain arithmetic, straight from the formula, for elu1 and one head."""

    def elu1(row):
        return [x + 1 if x > 0 else math.exp(x) for x in row]

    def turn(row, token):
        if angles is None:
            return row
        turned = []
        for pair, angle in enumerate(angles[token]):
            a, b = row[2 * pair], row[2 * pair + 1]
            turned += [a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)]
        return turned

    def dot(a, b):
        return sum(x * y for x, y in zip(a, b, strict=True))

    q, k = [elu1(row) for row in query], [elu1(row) for row in key]
    s = len(q[0]) ** -0.5
    if weights == "query_mean":
        mean = [sum(column) / len(q) for column in zip(*q, strict=True)]
        weights = [math.exp(s * dot(mean, row)) for row in k]
    alpha = [w / sum(weights) for w in weights]
    matrix = []
    for i, row in enumerate(q):
        den = sum(a * dot(row, other) for a, other in zip(alpha, k, strict=True))
        entries = []
        for j, other in enumerate(k):
            num = dot(turn(row, i), turn(other, j))
            entry = {
                "divide": num / (den + eps),
                "magnitude": s * num * (1 + 1 / (s * den + eps)) - s * den,
                "subtract": s * num + 1 - s * den,
                "none": num,
            }[normalizer]
            entries.append(alpha[j] * entry)
        matrix.append(entries)
    return matrix


@pytest.mark.parametrize("normalizer", ["divide", "magnitude", "subtract", "none"])
@pytest.mark.parametrize("weighting", ["uniform", "query_mean", "tensor"])
@pytest.mark.parametrize("rotated", [False, True])
def test_three_tokens_by_hand(normalizer, weighting, rotated):
    query = [[0.5, -1.0, 2.0, 0.1], [-0.3, 0.0, 1.0, -2.0], [1.5, 0.7, -0.2, 0.4]]
    key = [[-1.0, 0.2, 0.3, 0.9], [2.0, -0.5, 0.1, 0.0], [0.4, 0.4, -1.2, 1.1]]
    angles = [[t * 1.0, t / 10000] for t in range(3)] if rotated else None
    weights = {"uniform": [1, 1, 1], "query_mean": "query_mean", "tensor": [0.2, 1.5, 0.7]}[weighting]
    expected = torch.tensor(formula(query, key, normalizer, weights, angles), dtype=float64)
    scores = attention_scores(
        torch.tensor([[query]], dtype=float64),
        torch.tensor([[key]], dtype=float64),
        normalizer=normalizer,
        weighting=torch.tensor(weights, dtype=float64) if weighting == "tensor" else weighting,
        rotary=rotary_1d(3, 4, dtype=float64) if rotated else None,
    )
    torch.testing.assert_close(scores[0, 0], expected, rtol=1e-13, atol=1e-14)


def draw(tokens=50, width=16, scale=1.0):
    return (scale * torch.randn(1, 2, tokens, width, dtype=float64) for _ in range(2))


@pytest.mark.parametrize("normalizer", ["divide", "magnitude", "subtract"])
@pytest.mark.parametrize("weighting", ["uniform", "query_mean"])
def test_rows_sum_to_one_without_rotation(normalizer, weighting):
    rows = attention_scores(*draw(), normalizer=normalizer, weighting=weighting, eps=0).sum(-1)
    torch.testing.assert_close(rows, torch.ones_like(rows))


def test_magnitude_is_negative_exactly_where_the_threshold_says():
    q, k = draw(scale=3.0)
    scores = attention_scores(q, k, normalizer="magnitude", eps=0)
    similarity = attention_scores(q, k, normalizer="none") * 50 * 16**-0.5
    mean = similarity.mean(-1, keepdim=True)
    assert torch.equal(scores < 0, similarity / mean < mean / (1 + mean))
    assert (scores < 0).any()


def test_last_causal_row_is_the_bidirectional_one():
    q, k = draw()
    for normalizer in ("divide", "magnitude", "subtract", "none"):
        causal = attention_scores(q, k, normalizer=normalizer, causal=True)
        torch.testing.assert_close(causal[:, :, -1], attention_scores(q, k, normalizer=normalizer)[:, :, -1])
        assert causal.triu(1).eq(0).all()


def test_half_inputs_give_float32_scores():
    q, k = (x.half() for x in draw())
    scores = attention_scores(q, k)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores, attention_scores(q.float(), k.float()))


def test_scores_times_values_is_attention_for_unequal_lengths():
    q = torch.randn(2, 3, 5, 8, dtype=float64)
    k, v = torch.randn(2, 3, 11, 8, dtype=float64), torch.randn(2, 3, 11, 6, dtype=float64)
    for weighting in ("uniform", "query_mean"):
        expected = attention_scores(q, k, weighting=weighting) @ v
        torch.testing.assert_close(linear_attention(q, k, v, weighting=weighting), expected)
