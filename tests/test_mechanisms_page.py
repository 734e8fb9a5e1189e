"""The tables of docs/understand/mechanisms.md are what the package computes."""

import re
from pathlib import Path

import pytest
import timm
import torch
from tiers import quick

from evidence.published import PUBLISHED
from linvit.analysis.cost import count_cost
from linvit.layers.mechanisms import LINEAR_AXES, MECHANISMS
from linvit.layers.token_mechanisms import TOKEN_LAYERS
from linvit.models.swap import NAMES

PAGE = (Path(__file__).parents[1] / "docs" / "understand" / "mechanisms.md").read_text()
AXES = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("## Sizes")[0], re.MULTILINE))
SIZES = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.partition("## Sizes")[2], re.MULTILINE))
OWN = [name for family in ("vit_ttt", "hvittt", "nalaformer") for name in timm.list_models(f"{family}_*")]
# One attention at width 64, 4 heads of 16, on a 6 × 8 grid with a class token, 49 agents and 12 blocks.
N, C, H, D, AGENTS = 49, 64, 4, 16, 49


def cells(row):
    return [cell.strip() for cell in row.split(" | ")]


def value_of(formula, tokens):
    """A formula of the page at the sizes above."""
    text = formula.replace("²", "**2").replace(", with a class token", "")
    names = {"N": tokens, "C": C, "h": H, "d": D, "n": AGENTS, "H": 6, "W": 8, "M": 12}
    return eval(re.sub(r"(?<=[\w)])(?=[A-Za-z(])", "*", text), {}, names)


def test_all_mechanisms_are_listed():
    assert set(AXES) == set(MECHANISMS)
    assert set(SIZES) == {*NAMES, *OWN}


@pytest.mark.parametrize("mechanism", LINEAR_AXES)
def test_axes_are_the_presets(mechanism):
    kappa, alpha, normalizer = (tuple(re.findall(r"`(\w+)`", cell)) for cell in cells(AXES[mechanism])[:3])
    preset = {"feature_map": "elu1", "weighting": "uniform", "normalizer": "divide", **LINEAR_AXES[mechanism]}
    maps = preset["feature_map"]
    assert kappa == (maps if isinstance(maps, tuple) else (maps,))
    assert (alpha, normalizer) == ((preset["weighting"],), (preset["normalizer"],))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_extra_parameters_and_products(mechanism):
    *_, parameters, macs = cells(AXES[mechanism])
    tokens, options = N, {"num_prefix": 1}
    if mechanism == "mhla":  # equal blocks, whose states have no empty places
        tokens, options = N - 1, {"blocks": (3, 4)}
    layer = TOKEN_LAYERS[mechanism](C, H, mechanism, (6, 8), **options)
    layer.eval().last_grid.note((6, 8))
    extra = sum(p.numel() for p in layer.parameters()) - 4 * C * C - 4 * C
    if mechanism == "enhanced":
        assert (extra, value_of(parameters, tokens)) == (0, 40 * C)  # they stand in the feed-forward
    else:
        assert extra == value_of(parameters, tokens)
    layer.operator.fused = False  # the products of a fused softmax are not seen by the counter on every machine
    counted = count_cost(Alone(layer), (1, tokens, C)).macs_attention
    assert counted == value_of(macs, tokens)


class Alone(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x[:, 0])


@pytest.mark.parametrize(
    "name", quick([*NAMES, *OWN], [*OWN, *(n for n in NAMES if "deit" in n or n.endswith(("_inline", "_agent")))])
)
def test_sizes_are_computed(name):
    pattern, parameters, _, _, *published, source = cells(SIZES[name])
    model = timm.create_model(name, device="meta")
    assert pattern == model.pattern
    assert parameters == f"{sum(p.numel() for p in model.parameters()):,}"
    row = PUBLISHED.get(name)
    texts = ((row.parameters, "M"), (row.macs, "G"), (row.top1, "%")) if row else ((None, ""),) * 3
    assert published == [f"{value} {unit}" if value else "–" for value, unit in texts]
    assert source == (row.source if row else "–")


@pytest.mark.parametrize("name", quick([*NAMES, *OWN], ["swin_tiny_mala", "nalaformer_xtiny", "hvittt_tiny"]))
def test_macs_are_computed(name):
    _, _, macs, attention, *_ = cells(SIZES[name])
    cost = count_cost(timm.create_model(name, device="meta"), (3, 224, 224))
    assert (macs, attention) == (f"{cost.macs / 1e9:.3f} G", f"{cost.macs_attention / 1e9:.3f} G")
