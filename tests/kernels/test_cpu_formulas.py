"""Functions of a user in the C++ kernel, their learned tensors included, against plain torch in float64."""

import itertools
import shutil
import time

import pytest
import torch
from formula_examples import (
    FORMULAS,
    GENERATED,
    HEADS,
    WITHIN_TOKENS,
    assert_kernel_as_good_as_torch,
    generated_options,
    over_heads,
)
from hypothesis import HealthCheck, given, settings

from linvit.formulas import formula_of
from linvit.kernels import cpu
from linvit.kernels.cpu import compiling
from linvit.ops import linear_attention, rotary_1d

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
LENGTHS = (50, 0, 1, 130, 48)
FORMS = {
    "uniform": {},
    "query_mean": {"weighting": "query_mean"},
    "causal": {"causal": True},
    "blocks": {"causal": "block", "block_size": 20},
}


@pytest.fixture(scope="module", autouse=True)
def built():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


def mixed(p):
    """Channels enter one another, and each has a parameter."""
    return lambda x: x.norm(dim=-1, keepdim=True) * p.exp() + x * x


def curved(strength, rest, uses_mass):
    def normalizer(num, den, mass, scale, eps):
        share = rest / mass.sqrt().where(mass > 0, 1) if uses_mass else rest
        return strength / (num * num + den + eps), num * share + scale * strength

    return normalizer


def compare(tensors, rotary=None, **options):
    """Output and gradients of the kernel, whose errors are at most three times those of plain torch."""
    _, heads, _, width = tensors[0].shape
    random = torch.Generator().manual_seed(3)
    p, strength, rest = (torch.rand(shape, generator=random) - 0.5 for shape in ((heads, 1, width), (heads, 1, 1), ()))
    grad = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], generator=random)
    uses_mass = options.get("weighting") != "query_mean"  # the mass of these weights has no gradient

    def call(query, key, value, p, strength, rest, backend):
        tables = None if rotary is None else type(rotary)(*(table.to(p.dtype) for table in rotary))
        maps = {"feature_map": (torch.sigmoid, mixed(p)), "normalizer": curved(strength, rest, uses_mass)}
        return linear_attention(query, key, value, rotary=tables, backend=backend, **maps, **options)

    def all_of(dtype, backend):
        leaves = [x.to(dtype or x.dtype).requires_grad_() for x in (*tensors, p, strength, rest)]
        out = call(*leaves, backend)
        return [out, *torch.autograd.grad(out, leaves, grad.to(tensors[0].dtype).to(out.dtype))]

    found, twin, exact = all_of(None, "cpp"), all_of(None, "torch"), all_of(torch.float64, "torch")
    rounding = 1e-6 * max(x.norm() for x in exact[1:])  # a sum over tokens may cancel
    names = "output", "query", "key", "value", "map", "strength", "rest"
    for name, ours, torchs, true in zip(names, found, twin, exact, strict=True):
        error, allowed = ((x.double() - true).norm() for x in (ours, torchs))
        assert ours.shape == true.shape
        assert error <= 3 * max(allowed, rounding), name
    return found


def draw(tokens, width=17, value_width=13, batch=2, heads=3):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, tokens, size, generator=random) for size in (width, width, value_width)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_functions_equal_those_in_torch(form, masked):
    mask = None
    if masked:
        mask = torch.rand(2, 3, 131, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[0, 0] = mask[1, 1, :20] = False  # one head sees nothing, one nothing at first
    compare(draw(131), **{"key_mask": mask} if masked else {}, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_any_width_rotated(form):
    for width, value_width in ((2, 1), (64, 64), (34, 130)):
        compare(draw(49, width, value_width), rotary_1d(49, width), **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences(form):
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    compare(draw(sum(LENGTHS), batch=1), cu_seqlens=bounds, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_rounded_once(form):
    tensors = [x.to(torch.bfloat16) for x in draw(49)]
    found = compare(tensors, **FORMS[form])
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32] * (len(found) - 4)


@pytest.mark.parametrize("threads", [1, 7])
def test_parts_of_a_head_add_up(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for form in FORMS.values():
            compare(draw(500, batch=1, heads=1), **form)
    finally:
        torch.set_num_threads(before)


def test_compiled_once_and_again_if_cut(empty_cache):
    formula = formula_of(sharp, 2, 20, torch.device("cpu"))
    start = time.monotonic()
    compiling.compile_formula(formula)
    assert time.monotonic() - start < 15
    (library,) = empty_cache.glob("*.so")
    whole, first = library.read_bytes(), library.stat().st_mtime_ns
    compiling._addresses.clear()
    compiling.compile_formula(formula)
    assert library.stat().st_mtime_ns == first
    library.unlink()
    library.write_bytes(whole[:5000])
    compiling._addresses.clear()
    compiling.compile_formula(formula)
    assert library.read_bytes() == whole


@pytest.mark.parametrize(
    ("compiler", "source", "message"),
    [
        ("no-such-compiler", "int other;", r"there is no C\+\+ compiler 'no-such-compiler': install g\+\+"),
        ("c++", "int twice(int x) { return y; }", "'c\\+\\+' could not compile the formulas: .*error: .*y.*"),
        ("c++", "int other;", "'c\\+\\+' could not compile the formulas: .*undefined symbol: linvit_table"),
        ("true", "int other;", "'true' could not compile the formulas: "),
    ],
)
def test_what_cannot_be_compiled_is_said_in_a_sentence(compiler, source, message, monkeypatch, empty_cache):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(compiling, "library_source", lambda formula: source)
    with pytest.raises(ValueError, match=message) as raised:
        compiling.compile_formula(formula_of(sharp, 2, 20, torch.device("cpu")))
    assert "\n" not in str(raised.value)


def sharp(x):
    y = torch.relu(x).square()
    return y / (y.norm(dim=-1, keepdim=True) + 1e-6)


def softened(x):
    return torch.nn.functional.softplus(x * SHIFTS.to(x))


def doubtful(num, den, mass, scale, eps):
    gain = torch.sigmoid(num) / (den + eps)
    return gain, gain * num + 0.1 * den


SHIFTS = torch.linspace(0.5, 1.5, 20)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiling, "_addresses", {})
    return tmp_path / "linvit" / "formulas"


@pytest.mark.parametrize("form", [{}, {"weighting": "query_mean"}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("feature_map", "normalizer"),
    [(sharp, "divide"), (softened, doubtful), (("elu1", sharp), "magnitude")],
    ids=["sharp", "softened and doubtful", "sharp keys"],
)
def test_functions_of_torch_run_in_the_kernel(feature_map, normalizer, form):
    options = {"feature_map": feature_map, "normalizer": normalizer, **form}
    assert_kernel_as_good_as_torch("cpp", "cpu", options, rotary=rotary_1d(45, 20))


def test_a_function_is_compiled_once_and_said_so(empty_cache, caplog):
    query, key, value = torch.randn(3, 1, 2, 30, 16)
    for _ in range(2):
        out = linear_attention(query, key, value, feature_map=sharp)  # "auto" takes the kernel
        compiling._addresses.clear()
    with cpu.aside():
        torch.testing.assert_close(out, linear_attention(query, key, value, feature_map=sharp))
    assert len(list(empty_cache.glob("*.so"))) == 1
    (said,) = caplog.messages
    assert said.startswith("Compiling a function for the C++ kernel takes a second or two")


def test_a_tensor_that_a_function_holds_is_read_at_each_call():
    query, key, value = torch.randn(3, 1, 2, 30, 20)
    factor = torch.ones(20)

    def scaled(x):
        return torch.relu(x * factor) + 0.1

    outs = []
    for _ in range(2):
        outs.append(linear_attention(query, key, value, feature_map=scaled, backend="cpp"))
        expected = linear_attention(query, key, value, feature_map=scaled, backend="torch")
        torch.testing.assert_close(outs[-1], expected)
        factor.mul_(torch.linspace(0.2, 3, 20))
    assert not torch.allclose(*outs, atol=1e-3)


def by_mass(num, den, mass, scale, eps):
    return 1 / (den + mass), num / (den + mass)


def test_what_cannot_be_traced_or_compiled_says_so_and_runs_in_plain_torch(empty_cache, monkeypatch):
    query, key, value = torch.randn(3, 1, 2, 30, 16).requires_grad_()
    reasons = [
        (
            {"feature_map": lambda x: x.cumsum(2)},
            r"the queries' feature_map: `cumsum` \(test_cpu_formulas.py, line \d+\)",
        ),
        ({"normalizer": by_mass, "weighting": "query_mean"}, "the normalizer uses the mass, which has a gradient for"),
        ({"feature_map": sharp}, "there is no C\\+\\+ compiler 'no-such'"),
    ]
    monkeypatch.setenv("CXX", "no-such")
    for options, reason in reasons:
        with pytest.raises(ValueError, match=f"which cannot run: .*{reason}"):
            linear_attention(query, key, value, backend="cpp", **options)
        assert linear_attention(query, key, value, **options).shape == value.shape


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(FORMULAS)
def test_a_hundred_generated_formulas(formula):
    assert_kernel_as_good_as_torch("cpp", "cpu", generated_options(formula), GENERATED)


@pytest.mark.parametrize("name", WITHIN_TOKENS)
def test_every_mechanism_whose_maps_combine_no_tokens(name):
    assert_kernel_as_good_as_torch("cpp", "cpu", WITHIN_TOKENS[name])


@pytest.mark.parametrize(
    "form", [{}, {"weighting": "query_mean", "normalizer": "magnitude"}, {"causal": True}], ids=str
)
def test_features_over_heads_come_from_torch(form):
    mask = torch.rand(2, HEADS, 45, generator=torch.Generator().manual_seed(0)) > 0.4
    options = lambda *tensors: over_heads(*tensors) | form  # noqa: E731
    assert_kernel_as_good_as_torch("cpp", "cpu", options, GENERATED, rotary_1d(45, 20), mask)
