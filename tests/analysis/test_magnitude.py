import pytest
import timm
import torch

import linvit  # noqa: F401
from linvit.analysis.magnitude import (
    FACTORS,
    LOG_RATIO,
    PAPER_SCALE,
    QUARTILE,
    SORTED,
    compare_readouts,
    measure_magnitude,
)
from linvit.analysis.measured import rows, select
from linvit.analysis.probe import Operands, Probe
from linvit.analysis.scores import scaled
from linvit.formulas.feature_map import elu1
from linvit.layers.mechanisms import LINEAR_AXES
from linvit.ops import attention_scores

TOKENS, WIDTH = 37, 20
EXACT = {"rtol": 1e-10, "atol": 1e-14}


@pytest.fixture
def query_and_key():
    return torch.randn(2, 2, 3, TOKENS, WIDTH, dtype=torch.float64)


def scores(query, key, factor, **options):
    """The matrix when κ(q) is `factor` times as large, without ε, which is no part of the facts."""
    return attention_scores(factor * elu1(query), elu1(key), feature_map="identity", eps=0, **options)


def similarity(query, key):
    return elu1(query) @ elu1(key).mT * WIDTH**-0.5 / TOKENS


def magnitude_scores(sim, factor):
    """MALA's scores of a query that is `factor` times as large, from σ (…, keys): σ/S + factor · (σ - S/N)."""
    total = sim.sum(-1, keepdim=True)
    return sim / total + factor * (sim - total / sim.shape[-1])


def pairs_above_the_mean(sim):
    """For each query the most similar key, and the least similar one above the mean."""
    above = (sim - sim.mean(-1, keepdim=True)).masked_fill(sim <= sim.mean(-1, keepdim=True), torch.inf)
    return torch.stack((sim.argmax(-1), above.argmin(-1)), -1)


@pytest.mark.parametrize("factor", FACTORS)
def test_mala_scores_are_affine_in_the_magnitude(query_and_key, factor):
    query, key = query_and_key
    sim = similarity(query, key)
    expected = scores(query, key, 1, normalizer="divide") + factor * (sim - sim.mean(-1, keepdim=True))
    found = scores(query, key, factor, normalizer="magnitude")
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(found, magnitude_scores(sim, factor), **EXACT)


def test_ratio_of_mala_follows_equation_12_and_stays_between_its_ends(query_and_key):
    query, key = query_and_key
    sim = similarity(query, key)
    pair = pairs_above_the_mean(sim)
    total = sim.sum(-1)
    beta, gamma = 1 + 1 / total, total / TOKENS
    best, other = sim.gather(-1, pair).unbind(-1)
    before = best / other
    for factor in FACTORS:
        found = scores(query, key, factor, normalizer="magnitude").gather(-1, pair)
        ratio = found[..., 0] / found[..., 1]
        x = factor * beta / (factor + beta - 1)
        torch.testing.assert_close(ratio, (beta * best - x * gamma) / (beta * other - x * gamma), rtol=1e-9, atol=0)
        assert (ratio >= before).all()
        before = ratio
    assert (before <= (best - gamma) / (other - gamma)).all()


@pytest.mark.parametrize("factor", [0.25, 1.0, 16.0])
@pytest.mark.parametrize("scale", [1.0, TOKENS * WIDTH**0.5])
def test_a_score_is_negative_below_a_known_share_of_the_mean(query_and_key, factor, scale):
    query, key = query_and_key
    sim = factor * scale * similarity(query, key)
    total = sim.sum(-1, keepdim=True)
    expected = sim / sim.mean(-1, keepdim=True) < total / (1 + total)
    assert torch.equal(scores(query, key, factor * scale, normalizer="magnitude") < 0, expected)


@pytest.mark.parametrize("name", ["rala", "mala", "rala_mala", "efficient", "hydra", "inline", "focused"])
def test_operands_scaled_by_one_have_the_same_scores(query_and_key, name):
    query, key = query_and_key
    operands = Operands(query, key, key, LINEAR_AXES[name])
    torch.testing.assert_close(scaled(operands, 1.0).scores(), operands.scores(), rtol=1e-9, atol=1e-13)


def test_readouts_of_real_queries_say_what_the_facts_say(query_and_key):
    query, key = query_and_key
    probe = Probe("layer", "mala", Operands(query, key, key, LINEAR_AXES["mala"]), {"mixed": key}, (1, TOKENS))
    found = compare_readouts(probe)
    assert len(found) == 4 * len(FACTORS)

    def log_ratio(readout):
        return torch.stack([select(found, readout=readout, factor=a)[0].values[LOG_RATIO] for a in FACTORS])

    softmax, linear, mala, unscaled = map(log_ratio, ("softmax", "linear", "mala", PAPER_SCALE))
    torch.testing.assert_close(softmax, softmax[2] * torch.tensor(FACTORS, dtype=torch.float64)[:, None, None])
    torch.testing.assert_close(linear, linear[:1].expand_as(linear), rtol=1e-4, atol=1e-6)  # ε
    assert (mala.diff(dim=0) > 0).all()
    assert ((unscaled[-1] - unscaled[0]) < 0.1 * (mala[-1] - mala[0])).all()
    order = select(found, readout="mala", factor=1.0)[0].values[SORTED]
    assert order.shape == (2, 3, TOKENS)
    assert (order.diff(dim=-1) <= 0).all()
    assert 0 < int(QUARTILE * TOKENS) < TOKENS


def test_every_layer_of_a_network_is_scaled():
    network = timm.create_model("mavit_nano", pattern="LLSS")
    found = measure_magnitude(network, [torch.randn(2, 3, 64, 64)], factors=(0.5, 1.0, 2.0))
    assert [(one.layer.name, one.condition["factor"]) for one in found][:4] == [
        ("stages.0.blocks.0.attn", 0.5),
        ("stages.0.blocks.0.attn", 1.0),
        ("stages.0.blocks.0.attn", 2.0),
        ("stages.1.blocks.0.attn", 0.5),
    ]
    assert {row["images"] for row in rows(found)} == {2}
    for factor in (0.5, 2.0):
        softmax = [one for one in select(found, factor=factor) if one.layer.mechanism == "softmax"]
        once = [one for one in select(found, factor=1.0) if one.layer.mechanism == "softmax"]
        for at_factor, at_one in zip(softmax, once, strict=True):
            torch.testing.assert_close(at_factor.values[LOG_RATIO], factor * at_one.values[LOG_RATIO])
