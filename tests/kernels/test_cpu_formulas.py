"""Feature maps and normalizers written in C, in the C++ kernel, against the same in plain torch in float64."""

import itertools
import shutil
import time

import pytest
import torch

from linvit.kernels import cpu
from linvit.kernels.cpu import Compiled, compiling
from linvit.ops import linear_attention, rotary_1d

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
SOURCE = """
#include <cmath>

#include "formula.h"

namespace {

void sigmoid(const float* x, float* y, int64_t width, const float*) {
  for (int64_t c = 0; c < width; ++c) y[c] = 1 / (1 + std::exp(-x[c]));
}
void sigmoid_backward(const float* x, const float* dy, float* dx, int64_t width, const float*, float*) {
  for (int64_t c = 0; c < width; ++c) {
    const float y = 1 / (1 + std::exp(-x[c]));
    dx[c] = dy[c] * y * (1 - y);
  }
}

// ‖x‖ p + x²: channels enter one another, and each has a parameter.
void mixed(const float* x, float* y, int64_t width, const float* p) {
  float square = 0;
  for (int64_t c = 0; c < width; ++c) square += x[c] * x[c];
  for (int64_t c = 0; c < width; ++c) y[c] = std::sqrt(square) * p[c] + x[c] * x[c];
}
void mixed_backward(const float* x, const float* dy, float* dx, int64_t width, const float* p, float* sums) {
  float square = 0, product = 0;
  for (int64_t c = 0; c < width; ++c) square += x[c] * x[c], product += dy[c] * p[c];
  const float norm = std::sqrt(square);
  for (int64_t c = 0; c < width; ++c) {
    sums[c] += dy[c] * norm;
    dx[c] = product * x[c] / norm + 2 * dy[c] * x[c];
  }
}

// gain = p / (num² + den + eps), level = num r / √mass + scale
void curved(const float* num, const float* den, float mass, float scale, float eps, float* gain, float* level,
            int64_t count, const float* p) {
  for (int64_t t = 0; t < count; ++t) {
    gain[t] = p[0] / (num[t] * num[t] + den[t] + eps);
    level[t] = num[t] * p[1] / std::sqrt(mass) + scale;
  }
}
void curved_backward(const float* dgain, const float* dlevel, const float* num, const float* den, float mass, float,
                     float eps, float* dnum, float* dden, int64_t count, const float* p, float* sums) {
  for (int64_t t = 0; t < count; ++t) {
    const float share = 1 / (num[t] * num[t] + den[t] + eps);
    sums[0] += dgain[t] * share;
    sums[1] += dlevel[t] * num[t] / std::sqrt(mass);
    dden[t] = -dgain[t] * p[0] * share * share;
    dnum[t] = 2 * num[t] * dden[t] + dlevel[t] * p[1] / std::sqrt(mass);
  }
}

}  // namespace

extern "C" {
linvit::Map sigmoid_map{sigmoid, sigmoid_backward};
linvit::Map mixed_map{mixed, mixed_backward};
linvit::Normalizer curved_normalizer{curved, curved_backward};
}
"""
NAMES = ("sigmoid_map", "mixed_map", "curved_normalizer")
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


@pytest.fixture(scope="module")
def addresses(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return compiling.compile_formulas.__wrapped__(SOURCE, NAMES)


def curved(p):
    def normalizer(num, den, mass, scale, eps):
        strength, rest = over_tokens(p, num).split(1, -1)
        return strength / (num * num + den + eps), num * rest / mass.sqrt().where(mass > 0, 1) + scale

    return normalizer


def mixed(p):
    return lambda x: x.norm(dim=-1, keepdim=True) * over_tokens(p, x) + x * x


def over_tokens(p, x):
    """Parameters (batch, heads, any) beside (batch, heads, tokens, any), or with tokens in blocks."""
    return p.view(*p.shape[:2], *(1,) * (x.ndim - 3), -1)


def results(call, leaves, grad):
    out = call(*leaves)
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def compare(addresses, tensors, rotary=None, tolerance=1e-5, **options):
    """Output and gradients of the kernel, which takes prepared masks, and of plain torch."""
    sigmoid_map, mixed_map, normalizer = (addresses[name] for name in NAMES)
    batch, heads, _, width = tensors[0].shape
    random = torch.Generator().manual_seed(3)
    p = torch.rand(1, heads, width, generator=random) + 0.1
    strength = torch.rand(batch, 1, 2, generator=random) + 0.5
    if "weighting" in options:
        strength[..., 1] = 0  # the mass of these weights has no gradient
    grad = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], generator=random)

    def kernel(query, key, value, p, strength):
        axes = {"feature_map": (Compiled(sigmoid_map), Compiled(mixed_map, p))}
        axes["normalizer"] = Compiled(normalizer, strength)
        if "key_mask" in options and "weighting" in options:
            query = query * options["key_mask"].unsqueeze(-1)  # as the operator prepares it
        return cpu.linear_attention(query, key, value, rotary=rotary, **axes, **options)

    def plain(query, key, value, p, strength):
        axes = {"feature_map": (torch.sigmoid, mixed(p)), "normalizer": curved(strength)}
        tables = None if rotary is None else type(rotary)(*(table.double() for table in rotary))
        return linear_attention(query, key, value, rotary=tables, backend="torch", **axes, **options)

    found = results(kernel, [x.clone().requires_grad_() for x in (*tensors, p, strength)], grad)
    leaves = [x.double().requires_grad_() for x in (*tensors, p, strength)]
    expected = results(plain, leaves, grad.to(tensors[0].dtype))
    rounding = 1e-6 * max(x.norm() for x in expected[1:])  # a sum over tokens may cancel
    for name, ours, theirs in zip(
        ("output", "query", "key", "value", "map", "normalizer"), found, expected, strict=True
    ):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + rounding, name
    return found


def draw(tokens, width=17, value_width=13, batch=2, heads=3):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, tokens, size, generator=random) for size in (width, width, value_width)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("masked", [False, True])
def test_given_functions_equal_those_in_torch(addresses, form, masked):
    mask = None
    if masked:
        mask = torch.rand(2, 3, 131, generator=torch.Generator().manual_seed(1)) < 0.6
        mask[0, 0] = mask[1, 1, :20] = False  # one head sees nothing, one nothing at first
    compare(addresses, draw(131), **{"key_mask": mask} if masked else {}, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_any_width_rotated(addresses, form):
    for width, value_width in ((2, 1), (64, 64), (34, 130)):
        compare(addresses, draw(49, width, value_width), rotary_1d(49, width), **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences(addresses, form):
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    compare(addresses, draw(sum(LENGTHS), batch=1), cu_seqlens=bounds, **FORMS[form])


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_rounded_once(addresses, form):
    tensors = [x.to(torch.bfloat16) for x in draw(49)]
    found = compare(addresses, tensors, tolerance=4e-3, **FORMS[form])
    assert [x.dtype for x in found] == [torch.bfloat16] * 4 + [torch.float32] * 2


@pytest.mark.parametrize("threads", [1, 7])
def test_parts_of_a_head_add_up(addresses, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for form in FORMS.values():
            compare(addresses, draw(500, batch=1, heads=1), **form)
    finally:
        torch.set_num_threads(before)


def test_a_compiler_keeps_them_in_one_graph(addresses):
    leaves = [x.requires_grad_() for x in (*draw(49), torch.rand(1, 3, 17))]

    def call(query, key, value, p):
        maps = "elu1", Compiled(addresses["mixed_map"], p)
        return cpu.linear_attention(query, key, value, feature_map=maps, normalizer="magnitude")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    grad = torch.randn(2, 3, 49, 13)
    assert all(map(torch.equal, results(compiled, leaves, grad), results(call, leaves, grad)))


def test_compiled_once_and_again_if_cut(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_formulas = compiling.compile_formulas.__wrapped__
    start = time.monotonic()
    compile_formulas(SOURCE, NAMES[:1])
    assert time.monotonic() - start < 15
    (library,) = (tmp_path / "linvit" / "formulas").glob("*.so")
    whole, first = library.read_bytes(), library.stat().st_mtime_ns
    assert set(compile_formulas(SOURCE, NAMES)) == set(NAMES)
    assert library.stat().st_mtime_ns == first
    library.unlink()
    library.write_bytes(whole[:5000])
    compile_formulas(SOURCE, NAMES)
    assert library.read_bytes() == whole


@pytest.mark.parametrize(
    ("compiler", "source", "message"),
    [
        ("no-such-compiler", SOURCE, r"there is no C\+\+ compiler 'no-such-compiler': install g\+\+"),
        ("c++", "int twice(int x) { return y; }", "'c\\+\\+' could not compile the formulas: .*error: .*y.*"),
        ("c++", "int other;", "'c\\+\\+' could not compile the formulas: .*undefined symbol: sigmoid_map"),
        ("true", SOURCE, "'true' could not compile the formulas: "),
    ],
)
def test_what_cannot_be_compiled_is_said_in_a_sentence(compiler, source, message, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=message) as raised:
        compiling.compile_formulas.__wrapped__(source, NAMES)
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
    compiling.compile_formulas.cache_clear()
    monkeypatch.setattr(cpu, "_addresses", {})
    return tmp_path / "linvit" / "formulas"


@pytest.mark.parametrize("form", [{}, {"weighting": "query_mean"}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("feature_map", "normalizer"),
    [(sharp, "divide"), (softened, doubtful), (("elu1", sharp), "magnitude")],
    ids=["sharp", "softened and doubtful", "sharp keys"],
)
def test_functions_of_torch_run_in_the_kernel(feature_map, normalizer, form):
    tensors = [torch.randn(2, 2, 70, width) for width in (20, 20, 12)]
    rotary, grad = rotary_1d(70, 20), torch.randn(2, 2, 70, 12)
    options = {"feature_map": feature_map, "normalizer": normalizer, **form}

    def computed(dtype, backend):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        turn = type(rotary)(*(x.to(dtype) for x in rotary))
        out = linear_attention(*leaves, rotary=turn, backend=backend, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]

    exact = computed(torch.float64, "torch")
    for ours, torchs, true in zip(computed(torch.float32, "cpp"), computed(torch.float32, "torch"), exact, strict=True):
        error, allowed = ((x.double() - true).norm() / true.norm() for x in (ours, torchs))
        assert error <= 3 * max(allowed, 1e-7)


def test_a_function_is_compiled_once_and_said_so(empty_cache, caplog):
    query, key, value = torch.randn(3, 1, 2, 30, 16)
    for _ in range(2):
        out = linear_attention(query, key, value, feature_map=sharp)  # "auto" takes the kernel
        cpu._addresses.clear()
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
    query, key, value = torch.randn(3, 1, 2, 30, 16)
    learned = torch.ones(16, requires_grad=True)
    reasons = [
        (
            {"feature_map": lambda x: x.cumsum(2)},
            r"the queries' feature_map: `cumsum` \(test_cpu_formulas.py, line \d+\)",
        ),
        ({"feature_map": lambda x: x * learned}, "its tensors need gradients, which the kernels do not give"),
        ({"normalizer": by_mass, "weighting": "query_mean"}, "normalizer: it uses the mass, whose gradient"),
        ({"feature_map": sharp}, "there is no C\\+\\+ compiler 'no-such'"),
    ]
    monkeypatch.setenv("CXX", "no-such")
    for options, reason in reasons:
        with pytest.raises(ValueError, match=f"which cannot run: .*{reason}"):
            linear_attention(query, key, value, backend="cpp", **options)
        assert linear_attention(query, key, value, **options).shape == value.shape
