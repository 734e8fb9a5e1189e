"""The page's mathematics against linvit.ops and linvit.analysis, in float64."""

import itertools

import pytest
import torch
from page_modules import NODE, Node, head
from torch.testing import assert_close

from linvit.analysis.probe import Operands, kv_state
from linvit.analysis.rank import SPECTRUM, rank_measures
from linvit.analysis.scores import evenly, scaled, score_measures
from linvit.formulas.feature_map import FEATURE_MAPS
from linvit.formulas.normalizer import NORMALIZERS
from linvit.layers.mechanisms import MECHANISMS
from linvit.ops import attention_scores, initial_mixing, linear_attention, rotary_2d

pytestmark = pytest.mark.skipif(NODE is None, reason="there is no Node.js here to run the page's modules")

TOLERANCE = {"rtol": 1e-11, "atol": 1e-12}
MATRIX = """
    const matrix = ({head, axes, grid, rotated, magnitude}) => {
        const rotary = rotated ? attention.rotary2d(grid, head.width) : null;
        const scores = attention.scoresOf(head, axes, rotary);
        const places = Array.from({length: head.tokens}, (_, i) => i);
        const rows = places.map(i => Array.from(scores.row(i, magnitude)));
        const columns = places.map(j => Array.from(scores.column(j, magnitude)));
        return {rows, columns};
    };
"""
GRIDS = [(1, 1), (1, 5), (7, 7), (4, 9)]
KNOWN_MAPS = ("elu1", "relu", "exp", "identity", "unit", "softmax")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    return Node(tmp_path_factory.mktemp("modules"))


def tokens(grid, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 1, 1, grid[0] * grid[1], width, generator=generator, dtype=torch.float64)


def javascript_axes(axes):
    """The axes of a mechanism with the names of the page."""
    spelling = {"feature_map": "featureMap"}
    return None if axes is None else {spelling.get(key, key): value for key, value in axes.items()}


def expected_scores(axes, query, key, grid, rotated, magnitude=1.0):
    rotary = rotary_2d(grid, query.shape[-1], dtype=torch.float64) if rotated else None
    operands = Operands(query, key, key, axes, rotary)
    return (operands if magnitude == 1 else scaled(operands, magnitude)).scores()[0, 0]


def assert_matrix(matrix, expected, case=""):
    """Rows and columns of a matrix of the page are those of Python's."""
    for name, right in (("rows", expected), ("columns", expected.T)):
        actual = torch.tensor(matrix[name], dtype=torch.float64)
        assert_close(actual, right, **TOLERANCE, msg=lambda text, name=name: f"{case}, {name}: {text}")


def compare(node, cases):
    """Each case is axes, grid, width, rotated and magnitude."""
    sent, expected = [], []
    for seed, (axes, grid, width, rotated, magnitude) in enumerate(cases):
        query, key, _ = tokens(grid, width, seed)
        given = {"grid": grid, "rotated": rotated, "magnitude": magnitude}
        sent.append({"head": head(query[0, 0], key[0, 0]), "axes": javascript_axes(axes), **given})
        expected.append(expected_scores(axes, query, key, grid, rotated, magnitude))
    returned = node(f"{MATRIX} return given.cases.map(matrix);", cases=sent)
    assert len(returned) == len(cases)
    for case, matrix, right in zip(cases, returned, expected, strict=True):
        assert_matrix(matrix, right, case)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "rala", "mala"])
def test_the_four_mechanisms_score_as_in_python(node, mechanism):
    axes = MECHANISMS[mechanism].axes
    settings = itertools.product(GRIDS, (4, 16), (False, True), (0.25, 1.0, 8.0))
    compare(node, [(axes, *setting) for setting in settings])


def test_the_page_has_the_axes_of_the_table_of_mechanisms(node):
    expected = {name: javascript_axes(MECHANISMS[name].axes) for name in ("softmax", "linear", "rala", "mala")}
    assert node("return attention.MECHANISMS;") == expected


def test_every_feature_map_weighting_and_normalizer_scores_as_in_python(node):
    choices = itertools.product(KNOWN_MAPS, ("uniform", "query_mean"), NORMALIZERS, (False, True))
    axes = [
        ({"feature_map": feature_map, "weighting": weighting, "normalizer": normalizer}, rotated)
        for feature_map, weighting, normalizer, rotated in choices
        if not (feature_map in ("identity", "unit") and normalizer not in ("none", "sum", "subtract"))
    ]
    compare(node, [(axis, (3, 5), 8, rotated, 1.0) for axis, rotated in axes])
    compare(node, [(axis, (5, 3), 7, False, 1.0) for axis, _ in axes])


def test_the_page_offers_the_names_of_python(node):
    names = node(
        "return [attention.FEATURE_MAPS, attention.NORMALIZERS].map(Object.keys).concat([attention.WEIGHTINGS]);"
    )
    assert names == [list(KNOWN_MAPS), list(NORMALIZERS), ["uniform", "query_mean"]]
    assert set(KNOWN_MAPS) <= set(FEATURE_MAPS)


@pytest.mark.parametrize("normalizer", ["divide", "magnitude", "sum"])
@pytest.mark.parametrize("blocks", [(2, 2), (4, 3), (1, 5)])
def test_blocks_score_as_in_python(node, blocks, normalizer):
    grid = (5, 7)
    query, key, _ = tokens(grid, 8)
    given = {"weighting": "query_mean", "normalizer": normalizer}
    rotary = rotary_2d(grid, 8, dtype=torch.float64)
    where = {"mixing": initial_mixing(blocks), "blocks": blocks, "grid": grid}
    expected = attention_scores(query, key, rotary=rotary, **given, **where)[0, 0]
    axes = {**given, "blocks": {"rows": blocks[0], "columns": blocks[1], "grid": grid}}
    case = {"head": head(query[0, 0], key[0, 0]), "axes": axes, "magnitude": 1, "grid": grid, "rotated": True}
    assert_matrix(node(f"{MATRIX} return matrix(given.case);", case=case), expected)


@pytest.mark.parametrize("strength", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("normalizer", ["divide", "magnitude", "sum"])
def test_the_strength_of_the_weighting_multiplies_its_exponent(node, strength, normalizer):
    query, key, _ = tokens((4, 4), 8)
    mean = FEATURE_MAPS["elu1"](query).mean(-2, keepdim=True)
    weights = (strength * 8**-0.5 * (mean * FEATURE_MAPS["elu1"](key)).sum(-1)).exp()
    expected = attention_scores(query, key, weighting=weights, normalizer=normalizer)[0, 0]
    case = {
        "head": head(query[0, 0], key[0, 0]),
        "axes": {"weighting": "query_mean", "strength": strength, "normalizer": normalizer},
        "magnitude": 1,
    }
    assert_matrix(node(f"{MATRIX} return matrix(given.case);", case=case), expected)


def test_the_mean_over_heads_is_that_of_their_matrices(node):
    query, key, _ = torch.randn(3, 1, 3, 6, 8, dtype=torch.float64)
    expected = attention_scores(query, key, weighting="query_mean")[0].mean(0)
    program = """
        const mean = attention.meanScores(given.heads.map(head => attention.scoresOf(head, given.axes)));
        return [0, 1, 2, 3, 4, 5].map(i => [Array.from(mean.row(i)), Array.from(mean.column(i))]);
    """
    heads = [head(q, k) for q, k in zip(query[0], key[0], strict=True)]
    actual = torch.tensor(node(program, heads=heads, axes={"weighting": "query_mean"}), dtype=torch.float64)
    assert_close(actual[:, 0], expected, **TOLERANCE)
    assert_close(actual[:, 1].T, expected, **TOLERANCE)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("mechanism", ["linear", "rala", "mala"])
def test_the_state_is_that_of_python(node, mechanism, rotated):
    query, key, value = tokens((3, 4), 8)
    axes = MECHANISMS[mechanism].axes
    rotary = rotary_2d((3, 4), 8, dtype=torch.float64) if rotated else None
    expected = kv_state(Operands(query, key, value, axes, rotary))[0, 0]
    program = """
        const rotary = given.rotated ? attention.rotary2d([3, 4], 8) : null;
        return Array.from(attention.stateOf(given.head, {...given.axes, rotary}));
    """
    heads = head(query[0, 0], key[0, 0], value[0, 0])
    actual = node(program, head=heads, axes=javascript_axes(axes), rotated=rotated)
    expected = expected / expected.norm()  # kv_state leaves out a factor
    actual = torch.tensor(actual, dtype=torch.float64).view(8, 8)
    assert_close(actual / actual.norm(), expected, **TOLERANCE)


def test_measures_of_a_row_are_those_of_the_analysis(node):
    rows = torch.randn(4, 9, dtype=torch.float64)
    rows[0] = 0
    for row, actual in zip(rows, node("return given.rows.map(attention.measures);", rows=rows), strict=True):
        expected = score_measures(row[None, None, None])
        names = {"entropy": "entropy", "largest": "largest", "negative": "negative_mass", "sum": "row_sum"}
        for name, in_python in names.items():
            assert actual[name] == pytest.approx(expected[in_python].item(), rel=1e-12, abs=1e-14)


def matrices():
    generator = torch.Generator().manual_seed(0)

    def random(*size):
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return {
        "wide": random(5, 9),
        "tall": random(9, 5),
        "one entry": random(1, 1),
        "zero": torch.zeros(4, 4, dtype=torch.float64),
        "low rank": random(40, 3) @ random(3, 50),
        "graded": random(30, 30) @ torch.diag(10.0 ** -torch.arange(30, dtype=torch.float64) / 3) @ random(30, 30),
        "equal rows": torch.ones(6, 8, dtype=torch.float64),
        "softmax": (3 * random(60, 16) @ random(16, 60)).softmax(-1),
    }


def test_singular_values_and_ranks_are_those_of_torch(node):
    given = {name: {"data": x.flatten(), "rows": x.shape[0], "columns": x.shape[1]} for name, x in matrices().items()}
    program = """
        return Object.fromEntries(Object.entries(given.matrices).map(([name, matrix]) => {
            const values = spectrum.singularValues({...matrix, data: Float64Array.from(matrix.data)});
            return [name, {values: Array.from(values), ...spectrum.rankMeasures(values)}];
        }));
    """
    returned = node(program, matrices=given)
    for name, matrix in matrices().items():
        expected = torch.linalg.svdvals(matrix)
        actual = torch.tensor(returned[name]["values"], dtype=torch.float64)
        assert_close(actual, expected, rtol=0, atol=1e-13 * max(expected[0].item(), 1), msg=name)
        ranks = rank_measures(matrix)
        assert returned[name]["rank"] == ranks["rank_1e-3"].item(), name
        assert returned[name]["effective"] == pytest.approx(ranks["effective"].item(), rel=1e-10), name
        assert len(actual) == len(ranks[SPECTRUM])


def test_indices_are_spread_as_in_python(node):
    cases = [(1, 256), (5, 1), (5, 3), (256, 256), (1024, 256), (900, 256)]
    returned = node("return given.cases.map(([length, most]) => spectrum.evenly(length, most));", cases=cases)
    for (length, most), actual in zip(cases, returned, strict=True):
        assert len(actual) == min(length, most)
        if most > 1:  # halves round to even in torch, up in JavaScript
            difference = torch.tensor(actual) - evenly(length, most)
            assert difference.abs().max() <= 1


def test_the_timed_functions_compute_attention(node):
    query, key, value = tokens((4, 5), 16).float()
    given = {name: x.flatten() for name, x in zip(("query", "key", "value"), (query, key, value), strict=True)}
    program = """
        const inputs = [given.query, given.key, given.value].map(x => Float32Array.from(x));
        return [timing.softmaxAttention, timing.linearAttention].map(attend => Array.from(attend(...inputs)));
    """
    softmax, linear = torch.tensor(node(program, **given)).view(2, 1, 1, 20, 16)
    assert_close(softmax, torch.nn.functional.scaled_dot_product_attention(query, key, value), rtol=1e-5, atol=1e-5)
    assert_close(linear, linear_attention(query, key, value), rtol=1e-5, atol=1e-5)
