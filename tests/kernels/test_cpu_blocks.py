"""The C++ kernel of attention by blocks against the plain form in float64."""

import shutil

import pytest
import torch
from torch import library

from linvit.kernels import cpu
from linvit.layers.grid import after_prefix
from linvit.ops import linear_attention, rotary_2d
from linvit.ops.mixing import blocks_of_grid

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler here to build the kernel")
FORMS = {
    "equal blocks": ((4, 6), (2, 3), 0, 16),
    "ragged blocks, class token": ((7, 5), (3, 2), 1, 20),
    "many tokens": ((30, 31), (4, 4), 2, 16),
    "empty blocks": ((2, 3), (4, 4), 0, 24),
}
RULES = [
    {"normalizer": "divide", "feature_map": "relu_eps"},
    {"normalizer": "magnitude"},
    {"normalizer": "subtract", "feature_map": lambda x: x.square() + 0.1},
]


@pytest.fixture(scope="module", autouse=True)
def built():
    cpu.build()
    yield
    cpu.build.cache_clear()  # other tests are of torch; the library stays loaded


def draw(tokens, width, number, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, 3, tokens, width, generator=generator) for _ in range(3)]
    return [*tensors, torch.rand(3, number, number, generator=generator)], torch.randn(tensors[0].shape)


def output_and_gradients(inputs, grad, backend, dtype, **options):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = linear_attention(*leaves[:3], mixing=leaves[3], backend=backend, **options)
    return [out.detach(), *torch.autograd.grad((out * grad.to(dtype)).sum(), leaves)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES, ids=["MHLA", "MALA", "a function"])
@pytest.mark.parametrize("rotated", [False, True])
def test_output_and_gradients_are_as_good_as_torchs(form, rule, rotated):
    grid, blocks, prefix, width = FORMS[form]
    tokens, number = prefix + grid[0] * grid[1], blocks[0] * blocks[1] + (prefix > 0)
    inputs, grad = draw(tokens, width, number)
    options = {"blocks": blocks, "grid": grid, **rule}
    if rotated:
        options["rotary"] = after_prefix(rotary_2d(grid, width), prefix)
        options["key_mask"] = torch.arange(tokens).expand(2, -1) % 5 > 0
    exact = output_and_gradients(inputs, grad, "torch", torch.float64, **options)
    plain = output_and_gradients(inputs, grad, "torch", torch.float32, **options)
    kernel = output_and_gradients(inputs, grad, "cpp", torch.float32, **options)
    for right, by_torch, by_kernel in zip(exact, plain, kernel, strict=True):
        allowed = max(3 * (by_torch - right).norm().item(), 3e-7 * right.norm().item())
        assert (by_kernel - right).norm().item() <= allowed


def test_one_matrix_for_all_heads_and_other_dtypes():
    (query, key, value, mixing), _ = draw(35, 16, 6)
    where = {"blocks": (3, 2), "grid": (7, 5)}
    shared = linear_attention(query, key, value, mixing=mixing[0], backend="cpp", **where)
    by_head = linear_attention(query, key, value, mixing=mixing[:1].expand(3, -1, -1), backend="cpp", **where)
    assert torch.equal(shared, by_head)
    half = [x.bfloat16().transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    out = linear_attention(*half, mixing=mixing, backend="cpp", **where)
    exact = linear_attention(*(x.double() for x in half), mixing=mixing.double(), backend="torch", **where)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).norm() / exact.norm()).item() < 4e-3


def test_the_operator_keeps_torchs_rules_and_compiles_in_one_graph():
    (query, key, value, mixing), _ = draw(35, 16, 6)
    tensors = [x.requires_grad_() for x in (query, key, value)]
    cut = blocks_of_grid((7, 5), (3, 2), 0)
    given = *tensors, *(None,) * 4, cut.order, cut.cuts, mixing.requires_grad_(), *(None,) * 3, 0, 0, 1, False, 1e-6, 0
    library.opcheck(torch.ops.linvit_cpu.attend.default, given)

    def call(*tensors):
        return linear_attention(*tensors, mixing=mixing, blocks=(3, 2), grid=(7, 5))

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*tensors), call(*tensors))
    torch._dynamo.reset()


def test_what_has_no_kernel_says_so():
    (query, key, value, mixing), _ = draw(35, 16, 6)
    where = {"mixing": mixing, "blocks": (3, 2), "grid": (7, 5), "backend": "cpp"}
    with pytest.raises(ValueError, match="which cannot run: blocks have a kernel for bidirectional attention of a"):
        linear_attention(query, key, value, weighting="query_mean", **where)
    with pytest.raises(ValueError, match="the normalizer uses the mass, which has no gradient of a mixing"):
        linear_attention(query, key, value, normalizer="sum", **where)
    with torch.no_grad():
        out = linear_attention(query, key, value, normalizer="sum", **where)
        plain = linear_attention(query, key, value, normalizer="sum", **{**where, "backend": "torch"})
    assert ((out - plain).norm() / plain.norm()).item() < 3e-6
