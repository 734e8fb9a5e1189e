"""The operator in every combination of its axes, and the explicit matrix to compare it with."""

import itertools
import random

import torch

from linvit.ops import Rotary, attention_scores, rotary_1d

NORMALIZERS = ["divide", "magnitude", "magnitude_no_beta", "magnitude_no_gamma", "subtract", "none", "sum"]


def axes(tokens, width=8, batch=1, heads=2, causal=False, sampled=None):
    """Every combination of weighting, normalizer, rotation and mask, or as many of them drawn at random."""
    means = "prefix_query_mean" if causal else "query_mean"
    weightings = ["uniform", means, torch.rand(batch, heads, tokens, dtype=torch.float64)]
    rotaries = [None, rotary_1d(tokens, width, dtype=torch.float64)]
    masks = [None, torch.rand(batch, heads, tokens) > 0.3]
    combinations = list(itertools.product(weightings, NORMALIZERS, rotaries, masks))
    for weighting, normalizer, rotary, mask in random.Random(tokens).sample(combinations, sampled or len(combinations)):
        yield {"weighting": weighting, "normalizer": normalizer, "rotary": rotary, "key_mask": mask, "causal": causal}


def of_some_tokens(options, now):
    """The same options for one slice of the tokens."""
    cut = dict(options)
    if options["rotary"] is not None:
        cut["rotary"] = Rotary(*(table[now] for table in options["rotary"]))
    if options["key_mask"] is not None:
        cut["key_mask"] = options["key_mask"][..., now]
    if isinstance(options["weighting"], torch.Tensor):
        cut["weighting"] = options["weighting"][..., now]
    return cut


def by_matrix(query, key, value, **options):
    return attention_scores(query, key, **options) @ value


def distance(actual, expected):
    """The largest difference over the largest value."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-3)).item()
