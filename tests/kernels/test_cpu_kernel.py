"""The C++ kernel against the plain form in float64."""

import itertools
import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from kernel_judge import judge
from torch import library
from torch.utils import cpp_extension

from linvit.kernels import cpu, support
from linvit.kernels.cpu import compiling
from linvit.ops import linear_attention, rotary_1d

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
RELATIVE = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(scope="module", autouse=True)
def built():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


def draw(tokens=37, width=16, value_width=16, queries=None, heads=2, std=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sizes = ((queries or tokens, width), (tokens, width), (tokens, value_width))
    return [std * torch.randn(2, heads, *size, generator=generator).to(dtype) for size in sizes]


def distance(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def compare(tensors, rotary=None, tolerance=None, **options):
    found = linear_attention(*tensors, rotary=rotary, backend="cpp", **options)
    tables = None if rotary is None else type(rotary)(*(table.double() for table in rotary))
    expected = linear_attention(*(x.double() for x in tensors), rotary=tables, backend="torch", **options)
    assert found.dtype == tensors[0].dtype
    assert distance(found, expected) < (tolerance or RELATIVE[found.dtype])
    return found


@pytest.mark.parametrize("normalizer", support.NORMALIZERS)
@pytest.mark.parametrize("weighting", support.WEIGHTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_formula(normalizer, weighting, masked):
    mask = torch.rand(2, 2, 101, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    options = {"normalizer": normalizer, "weighting": weighting, "key_mask": mask}
    for feature_map, rotary in itertools.product(("elu1", ("relu", "exp")), (None, rotary_1d(101, 16))):
        # rounding of sums around zero: an identity map or a γ alone may leave little of them
        compare(draw(101), rotary, 1e-5, feature_map=feature_map, **options)


def test_many_rotated_tokens_lose_no_digits():
    judge(
        [x[:1, :1] for x in draw(16384, 64, 64)],
        kernel=partial(linear_attention, backend="cpp"),
        rotary=rotary_1d(16384, 64),
    )


@pytest.mark.parametrize(("width", "value_width"), [(4, 4), (24, 40), (64, 64), (20, 130), (160, 6), (128, 128)])
@pytest.mark.parametrize("tokens", [1, 47, 48, 49, 200])
def test_any_size(width, value_width, tokens):
    compare(draw(tokens, width, value_width), rotary_1d(tokens, width), weighting="query_mean")
    compare(draw(tokens, width, value_width, queries=5), normalizer="magnitude", tolerance=1e-5)


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (3, 2, 1, 0)])
def test_any_strides_and_dtype(dtype, order):
    tensors = [x.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist()) for x in draw(dtype=dtype)]
    compare(tensors, rotary_1d(37, 16), weighting="query_mean")


@pytest.mark.parametrize("weighting", support.WEIGHTINGS)
@pytest.mark.parametrize("threads", [1, 3, 8])
def test_any_number_of_threads(weighting, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = [x[:1, :1] for x in draw(1000, 32, 32)]
        found = compare(tensors, rotary_1d(1000, 32), weighting=weighting, normalizer="magnitude", tolerance=1e-5)
        again = linear_attention(
            *tensors, rotary=rotary_1d(1000, 32), weighting=weighting, normalizer="magnitude", backend="cpp"
        )
        assert torch.equal(found, again)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("std", [4.0, 16.0])
def test_large_activations_stay_finite_and_exact(std):
    tensors = draw(3136, 64, 64, std=std)
    for options in ({"weighting": "query_mean"}, {"normalizer": "magnitude"}):
        assert compare(tensors, **options).isfinite().all()


def test_means_far_from_zero_lose_no_digits():
    query, key, value = draw(16_384, 32, 32)
    compare((query, key, value + 100), normalizer="magnitude")


def test_exp_from_the_smallest_to_the_largest():
    x = torch.cat((torch.linspace(-87, 88, 4001), torch.tensor([-1e30, -90.0, 0.0, 88.8, float("inf")])))
    ones = torch.ones(1, 1, len(x), 1)
    found = linear_attention(
        x.view(1, 1, -1, 1),
        ones[:, :, :1],
        ones[:, :, :1],
        feature_map=("exp", "identity"),
        normalizer="none",
        backend="cpp",
    ).flatten()
    assert torch.allclose(found[:4001], x[:4001].double().exp().float(), rtol=3e-7, atol=0)
    assert found[4001:4004].tolist() == [0, 0, 1]
    assert not found[4004:].isfinite().any()  # as in the plain form: infinity times no covariance


def test_masked_tokens_may_hold_anything_and_none_gives_zeros():
    query, key, value = draw()
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, 20:] = mask[1] = False
    key[0, :, 20:] = value[1] = float("nan")
    found = linear_attention(query, key, value, key_mask=mask, backend="cpp")
    assert found[0].isfinite().all()
    assert torch.equal(found[1], torch.zeros_like(found[1]))
    query[0, :, 20:] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    found = linear_attention(*inputs, weighting="query_mean", key_mask=mask, backend="cpp")
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(found.sum(), inputs))


def test_nan_is_not_hidden():
    query, key, value = draw()
    value[0, 0, 3, 5] = float("nan")
    found = linear_attention(query, key, value, backend="cpp")
    assert found[0, 0, :, 5].isnan().all()
    query[1, 1, 7, 2] = float("nan")
    assert linear_attention(query, key, value, backend="cpp")[1, 1, 7].isnan().all()


def test_heads_lie_inside_the_tokens_where_the_queries_do():
    tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw()]
    assert compare(tensors).transpose(1, 2).is_contiguous()
    assert compare(draw()).is_contiguous()


def gradients(tensors, backend, grad, **options):
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = linear_attention(*leaves, backend=backend, **options)
    return torch.autograd.grad(out, leaves, grad.to(out.dtype))


def compare_gradients(tensors, rotary=None, tolerance=1e-5, **options):
    grad = torch.randn(*tensors[0].shape[:3], tensors[2].shape[3], generator=torch.Generator().manual_seed(2))
    found = gradients(tensors, "cpp", grad, rotary=rotary, **options)
    tables = None if rotary is None else type(rotary)(*(table.double() for table in rotary))
    expected = gradients([x.double() for x in tensors], "torch", grad, rotary=tables, **options)
    rounding = 1e-6 * max(x.norm() for x in expected)  # one token's query and key hardly have a gradient
    for name, ours, theirs in zip(("query", "key", "value"), found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours.double() - theirs).norm() <= tolerance * theirs.norm() + rounding, name


@pytest.mark.parametrize("normalizer", support.NORMALIZERS)
@pytest.mark.parametrize("weighting", support.WEIGHTINGS)
@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient(normalizer, weighting, masked):
    if (normalizer, weighting) == ("sum", "query_mean"):
        with pytest.raises(ValueError, match="uses the mass, which has a gradient for uniform weights only"):
            compare_gradients(draw(), normalizer=normalizer, weighting=weighting)
        return
    mask = torch.rand(2, 2, 101, generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    options = {"normalizer": normalizer, "weighting": weighting, "key_mask": mask}
    for feature_map, rotary in itertools.product(("elu1", ("relu", "exp")), (None, rotary_1d(101, 16))):
        compare_gradients(draw(101), rotary, feature_map=feature_map, **options)


@pytest.mark.parametrize(("width", "value_width", "tokens"), [(4, 4, 1), (24, 40, 49), (64, 64, 200), (20, 130, 96)])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2)])
def test_gradients_of_any_size_and_strides(width, value_width, tokens, order):
    back = torch.tensor(order).argsort().tolist()
    tensors = [x.permute(order).contiguous().permute(back) for x in draw(tokens, width, value_width)]
    for options in ({"weighting": "query_mean"}, {"normalizer": "magnitude"}):
        compare_gradients(tensors, rotary_1d(tokens, width), **options)
    compare_gradients(draw(tokens, width, value_width, queries=5))


@pytest.mark.parametrize("threads", [3, 8])
def test_gradients_with_any_number_of_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tensors = [x[:1, :1] for x in draw(1000, 32, 32)]
        compare_gradients(tensors, rotary_1d(1000, 32), weighting="query_mean", normalizer="magnitude")
        compare_gradients(tensors, rotary_1d(1000, 32))
    finally:
        torch.set_num_threads(before)


def test_half_gradients_have_the_dtype_of_the_inputs():
    tensors = draw(dtype=torch.bfloat16)
    grad = torch.randn(2, 2, 37, 16)
    for found, expected in zip(
        gradients(tensors, "cpp", grad), gradients(tensors, "torch", grad.bfloat16()), strict=True
    ):
        assert found.dtype == torch.bfloat16
        assert distance(found, expected.double()) < 1e-2


def test_second_derivatives_are_refused():
    leaves = [x.requires_grad_() for x in draw()]
    with pytest.raises(RuntimeError, match=r"no second derivatives \(create_graph=True"):
        torch.autograd.grad(linear_attention(*leaves, backend="cpp").sum(), leaves, create_graph=True)


def test_auto_takes_it_once_it_is_built_and_torch_where_it_cannot():
    query, key, value = draw(500, 32, 32)
    kernel = linear_attention(query, key, value, backend="cpp")
    assert torch.equal(linear_attention(query, key, value), kernel)
    with cpu.aside():
        assert not torch.equal(linear_attention(query, key, value), kernel)
    assert linear_attention(query.double(), key.double(), value.double()).dtype == torch.float64
    options = {"causal": True, "weighting": "prefix_query_mean"}
    expected = linear_attention(query, key, value, backend="torch", **options)
    assert torch.equal(linear_attention(query, key, value, **options), expected)


def test_forward_mode_and_vmap_get_what_they_ask_for():
    query, key, value = draw()
    _, tangent = torch.func.jvp(lambda x: linear_attention(query, x, value), (key,), (torch.ones_like(key),))
    expected = torch.func.jvp(
        lambda x: linear_attention(query, x, value, backend="torch"), (key,), (torch.ones_like(key),)
    )[1]
    assert torch.equal(tangent, expected)
    assert tangent.any()
    gradient = torch.func.grad(lambda x: linear_attention(query, x, value).sum())(key)
    key.requires_grad_()
    linear_attention(query, key, value).sum().backward()
    assert torch.allclose(gradient, key.grad, atol=1e-5)
    stacked = torch.vmap(linear_attention)(*(torch.stack((x, 2 * x)) for x in (query, key.detach(), value)))
    assert torch.allclose(stacked[0], linear_attention(query, key, value), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "axes", [{"feature_map": "focused"}, {"feature_map": "unit_channels", "normalizer": "sum"}], ids=str
)
def test_features_over_heads_come_from_torch(dtype, axes):
    judge(draw(), dtype, partial(linear_attention, backend="cpp"), rotary=rotary_1d(37, 16), **axes)


def test_what_the_kernel_cannot_do_is_said():
    query, key, value = draw()
    for match, options in {
        "weighting is 'prefix_query_mean'": {"causal": True, "weighting": "prefix_query_mean"},
        "float64": {"tensors": [x.double() for x in (query, key, value)]},
        "feature_map: 'softmax_tokens' combines tokens": {"feature_map": ("softmax", "softmax_tokens")},
        "weighting is a Tensor": {"weighting": torch.ones(37)},
        "a tensor is empty": {"tensors": (query[:0], key[:0], value[:0])},
    }.items():
        tensors = options.pop("tensors", (query, key, value))
        with pytest.raises(ValueError, match=f"`backend` is 'cpp', which cannot run: .*{match}"):
            linear_attention(*tensors, backend="cpp", **options)


def test_the_operator_keeps_torchs_rules():
    tensors = [x.requires_grad_() for x in draw()]
    table = rotary_1d(37, 16)
    library.opcheck(torch.ops.linvit_cpu.attend.default, (*tensors, *table, *(None,) * 8, 0, 0, 1, True, 1e-6, 0))
    library.opcheck(torch.ops.linvit_cpu.attend.default, (*tensors, *table, *(None,) * 8, 0, 0, 1, False, 1e-6, 5))


def test_a_compiler_keeps_the_kernel_in_one_graph():
    tensors, calls = [x.requires_grad_() for x in draw()], []

    def backend(graph, inputs):
        calls.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    def call(*given):
        return linear_attention(*given, rotary=rotary_1d(37, 16), weighting="query_mean")

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    found, expected = compiled(*tensors), call(*tensors)
    assert calls.count("linvit_cpu.attend.default") == 1
    assert torch.equal(found, expected)
    gradients = [torch.autograd.grad(out.square().sum(), tensors) for out in (found, expected)]
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    torch._dynamo.reset()
    with cpu.aside():
        torch.compile(call, fullgraph=True, backend=backend)(*tensors)
    assert calls.count("linvit_cpu.attend.default") == 1


def test_an_exported_program_has_the_kernel_only_if_it_was_asked_for():
    class Attends(torch.nn.Module):
        def __init__(self, backend):
            super().__init__()
            self.backend = backend

        def forward(self, *tensors):
            return linear_attention(*tensors, backend=self.backend)

    for backend, kept in (("cpp", 1), ("auto", 0)):
        program = torch.export.export(Attends(backend), tuple(draw()))
        assert [str(node.target) for node in program.graph.nodes].count("linvit_cpu.attend.default") == kept
        torch.testing.assert_close(program.module()(*draw()), linear_attention(*draw(), backend="torch"))


@pytest.mark.slow
def test_building_says_nothing(tmp_path):
    command = [sys.executable, "-c", "from linvit.kernels import cpu; cpu.build()"]
    environment = {**os.environ, "CUDA_HOME": str(tmp_path)}  # a CUDA compiler without a GPU
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "no C\\+\\+ compiler 'no-such-compiler': install"),
        ("false", "'false' could not compile the CPU kernel .*: set CXX"),
        ("true", "'true' could not compile the CPU kernel .*: set CXX"),
        ("cat", "'cat' could not compile the CPU kernel .*: set CXX"),
    ],
)
def test_a_machine_that_cannot_compile_says_so(compiler, message, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(compiling, "PREBUILT", tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    # or torch would compile the true library under another name later, and open it beside the first
    monkeypatch.setattr(cpp_extension, "JIT_EXTENSION_VERSIONER", type(cpp_extension.JIT_EXTENSION_VERSIONER)())
    with pytest.raises(ValueError, match=message):
        cpu.build.__wrapped__()


@pytest.mark.slow
def test_a_damaged_library_is_compiled_again(tmp_path):
    """Opening a library that is cut ends the process with SIGBUS."""
    (tmp_path / "nothing.cpp").write_text("int nothing[4096] = {1};")
    code = """if True:
        import sys, pathlib; from linvit.kernels.cpu import compiling
        folder = pathlib.Path(sys.argv[1])
        compiling.SOURCES = [folder / "nothing.cpp"]
        compiling.compile_library("none", folder)
    """
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, check=True)
    library = tmp_path / "linvit_cpu_none.so"
    whole = library.read_bytes()
    for size in (0, 5000):
        os.truncate(library, size)
        subprocess.run(command, check=True)
        assert library.read_bytes() == whole


LENGTHS = (50, 0, 1, 200, 48)


def packed(dtype=torch.float32, order=(0, 1, 2, 3)):
    tokens = sum(LENGTHS)
    tensors = [x[:1] for x in draw(tokens, 16, 24, heads=3, dtype=dtype)]
    tensors = [x.permute(order).contiguous().permute(torch.tensor(order).argsort().tolist()) for x in tensors]
    return tensors, torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32), rotary_1d(tokens, 16)


@pytest.mark.parametrize("weighting", support.WEIGHTINGS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("threads", [1, 40])
@pytest.mark.parametrize(("dtype", "order"), [(torch.float32, (0, 1, 2, 3)), (torch.bfloat16, (0, 2, 1, 3))])
def test_packed_sequences(weighting, masked, threads, dtype, order):
    tensors, cu_seqlens, rotary = packed(dtype, order)
    mask = torch.rand(1, 3, sum(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for normalizer in support.NORMALIZERS:
            options = {"weighting": weighting, "normalizer": normalizer, "key_mask": mask, "cu_seqlens": cu_seqlens}
            compare(tensors, rotary, 1e-5 if dtype == torch.float32 else None, **options)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("options", [{"weighting": "query_mean"}, {"normalizer": "magnitude"}], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_of_packed_sequences(options, masked):
    tensors, cu_seqlens, rotary = packed()
    mask = torch.rand(1, 3, sum(LENGTHS), generator=torch.Generator().manual_seed(1)) < 0.6 if masked else None
    options = {**options, "key_mask": mask, "cu_seqlens": cu_seqlens}
    compare_gradients(tensors, rotary, **options)
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = linear_attention(*leaves, rotary=rotary, backend="cpp", **options)
    given = torch.autograd.grad(out[:, :, :50].sum(), leaves)  # of the first sequence
    assert all(x[:, :, 50:].eq(0).all() and x[:, :, :50].ne(0).any() for x in given)


def test_tokens_without_weight_leave_the_means_alone():
    """Most exponents are far below the last: the means before it are large, and the rounding of its share is not."""
    query, key, value = draw(170)
    key = key + torch.linspace(-200, 0, 170)[:, None] / 4
    rule = {"feature_map": "identity", "normalizer": "none", "weighting": "query_mean"}
    compare((torch.ones_like(query), key, value), tolerance=3e-7, **rule)
