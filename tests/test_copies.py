"""The files to copy in docs/use/copy: equal to linvit in float64, gradients too, and without linvit."""

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from linvit.formulas.feature_map import relu_eps
from linvit.layers import Operator
from linvit.layers.recent_mechanisms import InnerStepAttention, NormAwareAttention, ScaledPolarAttention
from linvit.ops import linear_attention, rotary_2d
from linvit.ops.mixing import initial_mixing

DOCS = Path(__file__).parents[1] / "docs" / "use"
FILES = sorted((DOCS / "copy").glob("*.py"))
GRID, HEADS, WIDTH = (4, 6), 2, 8
LINES = 40  # without empty ones


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True)


def inputs():
    return [drawn(3, HEADS, GRID[0] * GRID[1], WIDTH, seed=seed) for seed in range(3)]


def copied(name, function=None):
    return runpy.run_path(str(DOCS / "copy" / f"{name}.py"))[function or name]


def assert_equal(copy, ours, tensors):
    """Output, and gradients of each tensor."""
    got, expected = copy(*tensors), ours(*tensors)
    assert_close(got, expected, rtol=0, atol=1e-12)
    weights = drawn(*expected.shape, seed=9).detach()
    gradients = [torch.autograd.grad((output * weights).sum(), tensors) for output in (got, expected)]
    for got, expected in zip(*gradients, strict=True):
        assert expected.count_nonzero()
        assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", ["linear", "rala", "mala"])
def test_operators(name):
    rotary = None if name == "linear" else rotary_2d(GRID, WIDTH, dtype=torch.float64)
    place = () if name == "linear" else (GRID,)
    operator = Operator(name, HEADS, WIDTH)
    assert_equal(lambda q, k, v: copied(name)(q, k, v, *place), lambda q, k, v: operator(q, k, v, rotary), inputs())


def test_mhla():
    blocks = (2, 3)
    assert_close(copied("mhla", "first_mixing")(*blocks), initial_mixing(blocks))
    options = {"feature_map": relu_eps, "blocks": blocks, "grid": GRID}
    assert_equal(
        lambda q, k, v, m: copied("mhla")(q, k, v, m, blocks, GRID),
        lambda q, k, v, m: linear_attention(q, k, v, mixing=m, **options),
        [*inputs(), drawn(6, 6, seed=4).detach().abs().requires_grad_()],
    )


def test_vittt():
    layer = InnerStepAttention(HEADS * WIDTH, HEADS, "vittt", GRID, dtype=torch.float64)

    def ours(q, k, v, w1, w2):
        layer.operator.w1, layer.operator.w2 = w1, w2
        return layer.operator(q, k, v)

    for weight in ("w1", "w2"):
        delattr(layer.operator, weight)
    assert_equal(copied("vittt"), ours, [*inputs(), *(drawn(HEADS, WIDTH, WIDTH, seed=seed) for seed in (5, 6))])


def test_vittt_s_convolution():
    layer = InnerStepAttention(HEADS * WIDTH, HEADS, "vittt", GRID, dtype=torch.float64)
    layer.local_qkv = torch.nn.Identity()
    del layer.w3

    def ours(q, k, v, w3):
        layer.w3 = w3
        joined = torch.cat([y.flatten(2).mT for y in (q, k, v)], dim=-1)
        return layer.local(joined, GRID).mT.unflatten(-1, GRID)

    maps = [drawn(3, WIDTH, *GRID, seed=seed) for seed in range(3)]
    assert_equal(copied("vittt", "vittt_local"), ours, [*maps, drawn(WIDTH, 3, 3, seed=3)])


def with_inputs(layer, q, k, v):
    """What the operator of a layer reads instead of the projections of x."""
    layer.qkv = torch.nn.Identity()
    x = torch.cat([y.transpose(1, 2).flatten(2) for y in (q, k, v)], dim=-1)
    rotary = layer.rotary(x[..., : HEADS * WIDTH], GRID)
    return layer.operator(*layer.query_key_value(x, GRID), rotary)


def test_nala():
    layer = NormAwareAttention(HEADS * WIDTH, HEADS, "nala", GRID, dtype=torch.float64)
    assert_equal(lambda q, k, v: copied("nala")(q, k, v, GRID), lambda q, k, v: with_inputs(layer, q, k, v), inputs())
    q, k, v = inputs()
    assert torch.equal(copied("nala")(torch.zeros_like(q), k, v, GRID), torch.zeros_like(v))


def test_polaformer_pp():
    layer = ScaledPolarAttention(HEADS * WIDTH, HEADS, "polaformer_pp", GRID, dtype=torch.float64)
    del layer.sharpness

    def ours(q, k, v, s1, s2):
        layer.sharpness = torch.stack((s1, s2), dim=1)
        halves = with_inputs(layer, q, k, v)
        return halves.unflatten(1, (HEADS, 2)).transpose(2, 3).flatten(3)

    sharpness = [drawn(HEADS, 1, 2 * WIDTH, seed=seed) for seed in (3, 4)]
    assert_equal(lambda *tensors: copied("polaformer_pp")(*tensors, GRID), ours, [*inputs(), *sharpness])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_files_need_torch_alone_and_are_short(file):
    text = file.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert modules <= {"torch", "torch.nn.functional"}
    assert len([line for line in text.splitlines() if line]) <= LINES
    assert "https://" in (ast.get_docstring(ast.parse(text)) or "")


def test_the_page_shows_the_files():
    shown = re.findall(r"```python\n(.*?)```", (DOCS / "copy.md").read_text(), flags=re.DOTALL)
    assert sorted(shown) == sorted(file.read_text() for file in FILES)
