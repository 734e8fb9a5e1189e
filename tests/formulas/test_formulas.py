"""Traced formulas: their values and those of their C++, derivatives included, against torch in float64."""

import ctypes
import re
import subprocess
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from formula_examples import (
    EPS,
    FORMULAS,
    HEADS,
    MAPS,
    RULES,
    SCALE,
    WIDTH,
    Example,
    assert_as_good_as_torch,
    by_torch,
    gradients,
    held,
    inputs,
    rows,
    traced,
    written,
)
from hypothesis import given, settings
from torch import nn
from torch.nn import functional as F

from linvit import formulas
from linvit.formulas.cpp_source import cpp_source
from linvit.formulas.device import lowered
from linvit.formulas.recorder import Untraceable
from linvit.formulas.trace import trace_map, trace_normalizer
from linvit.formulas.triton_source import triton_source
from linvit.formulas.values import OPERATIONS, in_order
from linvit.kernels.cpu.compiling import FLAGS, HEADER

EXAMPLES = [(name, False) for name in MAPS] + [(name, True) for name in RULES]


def evaluate(outputs, given):
    """The outputs in plain torch, in the dtype of the given numbers, whose channels are the last axis."""
    computed = {}
    like = next(iter(given.values()))
    for value in in_order(outputs):
        if value.op == "input":
            computed[value] = given[value.data]
        elif value.op == "constant":
            dtype = torch.bool if isinstance(value.data, bool) else like.dtype
            computed[value] = torch.tensor(value.data, dtype=dtype, device=like.device)
        else:
            computed[value] = OPERATIONS[value.op].torch(*(computed[operand] for operand in value.operands))
    return [computed[output] for output in outputs]


def by_values(formula, learned, rule):
    tensors = held(formula, rule, torch.float64)
    parameters = [x.unsqueeze(1) for x in formula.parameter_tensors(tensors)]
    given = dict(zip([x.data for x in formula.parameters], parameters, strict=True))
    if rule:
        numbers, d = rows()
        like = numbers[0]
        given |= {**dict(zip(("num", "den", "mass", "dgain", "dlevel"), numbers + d, strict=True))}
        given |= {"scale": torch.tensor(SCALE).double(), "eps": torch.tensor(EPS).double()}
    else:
        like, given["dy"] = inputs()
        given["x"] = like
    values = [*formula.outputs, *formula.gradients, *(value for value, _ in formula.sums)]
    computed = [
        x.expand(like.shape) if x.shape[-1:] != (1,) else x.expand(*like.shape[:-1], 1) for x in evaluate(values, given)
    ]
    count = len(formula.outputs) + len(formula.gradients)
    sums = [
        (x.expand(like.shape) if varies else x).sum(2, keepdim=True)
        for x, (_, varies) in zip(computed[count:], formula.sums, strict=True)
    ]
    return [x.expand(like.shape) for x in computed[:count]] + gradients(formula, learned, sums, tensors)


@pytest.mark.parametrize(("name", "rule"), EXAMPLES)
def test_values_are_those_of_torch(name, rule):
    formula, example, learned = traced(name, rule)
    for actual, exact in zip(by_values(formula, learned, rule), by_torch(example, torch.float64, rule), strict=True):
        torch.testing.assert_close(actual, exact, rtol=1e-12, atol=1e-12)


CALLS = """
#include "formulas.h"
using namespace linvit_formula;
template <typename F> void map(const float* x, const float* dy, float* y, float* dx, int64_t tokens, int64_t width,
                               const float* const* parameters, float* const* sums) {
  for (int64_t t = 0; t < tokens * width; t += width) {
    F::values(x + t, y + t, width, parameters);
    F::gradients(x + t, dy + t, dx + t, width, parameters, sums);
  }
}
template <typename F> void rule(const float* const* given, float* gain, float* level, float* dnum, float* dden,
                                int64_t tokens, float scale, float eps, const float* const* parameters,
                                float* const* sums) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float num = given[0][t], den = given[1][t], mass = given[2][t];
    const auto out = F::values(num, den, mass, scale, eps, parameters);
    const auto d = F::gradients(given[3][t], given[4][t], num, den, mass, scale, eps, parameters, sums);
    gain[t] = out[0], level[t] = out[1], dnum[t] = d[0], dden[t] = d[1];
  }
}
extern "C" {
"""
MAP = """void forward_{0}(const float* x, const float* dy, float* y, float* dx, int64_t tokens, int64_t width,
                    const float* const* parameters, float* const* sums) {{
  map<formula_{0}>(x, dy, y, dx, tokens, width, parameters, sums); }}
"""
RULE = """void forward_{0}(const float* const* given, float* gain, float* level, float* dnum, float* dden,
                    int64_t tokens, float scale, float eps, const float* const* parameters, float* const* sums) {{
  rule<formula_{0}>(given, gain, level, dnum, dden, tokens, scale, eps, parameters, sums); }}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """All examples, compiled."""
    folder = tmp_path_factory.mktemp("formulas")
    formulas = {(name, rule): traced(name, rule)[0] for name, rule in EXAMPLES}
    (folder / "formulas.h").write_text(cpp_source(*formulas.values()))
    digests = {formula.digest: rule for (_, rule), formula in formulas.items()}
    calls = "".join((RULE if rule else MAP).format(digest) for digest, rule in digests.items())
    (folder / "calls.cpp").write_text(f"{CALLS}{calls}}}\n")
    flags = [*FLAGS, f"-I{HEADER.parent}", "-Wall", "-Wno-unused-variable", "-shared", "-fPIC"]
    subprocess.run(["g++", *flags, "calls.cpp", "-o", "calls.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "calls.so"))


def pointers(tensors):
    return (ctypes.c_void_p * max(len(tensors), 1))(*(x.data_ptr() for x in tensors))


def by_cpp(library, formula, learned, rule):
    call = getattr(library, f"forward_{formula.digest}")
    tensors = held(formula, rule, torch.float32)
    parameters = [x.expand(HEADS, -1).float().contiguous() for x in formula.parameter_tensors(tensors)]
    given = [x for group in rows(torch.float32) for x in group] if rule else list(inputs(torch.float32))
    outs = [torch.empty_like(given[0]) for _ in (*formula.outputs, *formula.gradients)]
    batch, heads, tokens, width = given[0].shape
    sums = [torch.zeros(batch, heads, 1, width if varies else 1) for _, varies in formula.sums]
    for b in range(batch):
        for h in range(heads):
            rest = pointers([x[h] for x in parameters]), pointers([x[b, h] for x in sums])
            if rule:
                numbers = pointers([x[b, h] for x in given])
                places = [ctypes.c_void_p(x[b, h].data_ptr()) for x in outs]
                call(numbers, *places, ctypes.c_int64(tokens), ctypes.c_float(SCALE), ctypes.c_float(EPS), *rest)
            else:
                places = [ctypes.c_void_p(x[b, h].data_ptr()) for x in (*given, *outs)]
                call(*places, ctypes.c_int64(tokens), ctypes.c_int64(width), *rest)
    return outs + gradients(formula, learned, sums, tensors)


@pytest.mark.parametrize(("name", "rule"), EXAMPLES)
def test_cpp_is_as_good_as_torch(library, name, rule):
    formula, example, learned = traced(name, rule)
    assert_as_good_as_torch(by_cpp(library, formula, learned, rule), example, rule)


LIMIT = torch.tensor(1.0)


def branches(x):
    if LIMIT > 0:
        return x.clamp_max(LIMIT)
    return x


def writes(x):
    y = x + 0
    y[..., :].add_(1)
    return y


class Accumulated(torch.autograd.Function):
    """Whose derivative mixes channels in a way that kernels do not know."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(-1)


UNKNOWN = "is no pointwise operation and no reduction over the channels of a head that the kernels know"
REFUSED = [
    (branches, "`bool` (test_formulas.py, line {}) needs numbers that are not known before the kernel runs"),
    (lambda x: x[:, :, 0], "`getitem` (test_formulas.py, line {}) " + UNKNOWN),
    (lambda x: x.softmax(-2), "`softmax` (test_formulas.py, line {}) combines tokens"),
    (lambda x: x - x.mean(0, keepdim=True), "`mean` (test_formulas.py, line {}) combines tokens"),
    (
        lambda x: x / torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True),
        "`linalg_vector_norm` (test_formulas.py, line {}) combines heads",
    ),
    (
        lambda x: F.normalize(x.transpose(1, 2).flatten(2), dim=-1).unflatten(-1, (HEADS, -1)).transpose(1, 2),
        "`flatten` (test_formulas.py, line {}) combines heads",
    ),
    (
        lambda x: (x / x.norm(dim=(1, 3), keepdim=True)).softmax(2),
        "`norm` (test_formulas.py, line {}) combines heads, and the function also combines tokens",
    ),
    (lambda x: x.sort(-1).values, "`sort` (test_formulas.py, line {}) " + UNKNOWN),
    (
        lambda x: x.cumsum(-1),
        "`cumsum` (test_formulas.py, line {}) combines its argument with a tensor of shape (17, 17), which is none for "
        "heads and width",
    ),
    (lambda x: x @ torch.eye(17), "`matmul` (test_formulas.py, line {}) cuts or joins axes"),
    (lambda x: torch.cat((x[..., 1:], x[..., :1]), -1), "`getitem` (test_formulas.py, line {}) cuts or joins axes"),
    (
        lambda x: (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1),
        "`mul` (test_formulas.py, line {}) combines every number of an axis with every other",
    ),
    (
        lambda x: x + torch.rand_like(x),
        "`rand_like` (test_formulas.py, line {}) draws random numbers, and a formula is the same in every call",
    ),
    (
        lambda x: x + torch.arange(x.shape[2])[:, None],
        "`arange` (test_formulas.py, line {}) makes a tensor that differs from token to token",
    ),
    (
        lambda x: x.bfloat16().float(),
        "`bfloat16` (test_formulas.py, line {}) gives torch.bfloat16, and device code computes in float32",
    ),
    (writes, "`add` (test_formulas.py, line {}) writes into a tensor that is given, kept or a view of another"),
    (Accumulated.apply, "`flip` (test_formulas.py, line {}) " + UNKNOWN),
    (
        lambda x: x / x.shape[2],
        "the function computes something else for other tensors, as if it knew their numbers or how many there are",
    ),
    (
        lambda x: x * float(x.detach().numpy().max()),
        "the function computes something else for other tensors, as if it knew their numbers or how many there are",
    ),
    (
        lambda x: x + torch.zeros(49, 17),
        "the function fails for a tensor of shape (11, 3, 13, 17): The size of tensor a (13) must match the size of "
        "tensor b (49) at non-singleton dimension 2",
    ),
    (
        lambda x: x.sum(-1),
        "the function returns torch.float32 of shape (11, 3, 13) for torch.float32 of shape (11, 3, 13, 17)",
    ),
    (
        lambda x: x.double(),
        "the function returns torch.float64 of shape (11, 3, 13, 17) for torch.float32 of shape (11, 3, 13, 17)",
    ),
    (lambda x: (x, x), "the function returns a tuple for torch.float32 of shape (11, 3, 13, 17)"),
]


@pytest.mark.parametrize(("function", "sentence"), REFUSED)
def test_what_cannot_be_traced_says_where(function, sentence):
    with pytest.raises(Untraceable) as error:
        trace_map(function, HEADS, WIDTH)
    assert re.sub(r"line \d+", "line {}", str(error.value)) == sentence


def test_the_line_is_the_users():
    with pytest.raises(Untraceable) as error:
        trace_map(branches, HEADS, WIDTH)
    assert f"line {branches.__code__.co_firstlineno + 1})" in str(error.value)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda num, den, mass, scale, eps: (num / max(eps, 1e-3), num),
            "`bool` (test_formulas.py, line {}) needs numbers",
        ),
        (lambda num, den, mass, scale, eps: num, "the function returns a Tensor, expected two tensors: gain and level"),
    ],
)
def test_normalizers_that_cannot_be_traced(function, reason):
    with pytest.raises(Untraceable) as error:
        trace_normalizer(function, HEADS)
    assert re.sub(r"line \d+", "line {}", str(error.value)).startswith(reason)


def test_what_is_never_negative():
    positive = {name for name in MAPS if traced(name)[0].is_positive}
    assert positive >= {
        "elu1",
        "elu",
        "relu",
        "exp",
        "softmax",
        "softplus",
        "sigmoid",
        "clamped",
        "power",
    }
    assert not positive & {"identity", "gelu", "silu", "unit", "log softmax", "centred", "leaky", "cosine"}


def test_which_normalizers_are_proportional():
    proportional = {name for name in RULES if traced(name, True)[0].is_proportional}
    assert proportional == {"divide", "magnitude_no_gamma", "sum", "none"}


def test_elu1_costs_what_was_written_by_hand():
    """One exponential for the value and its derivative, one product with its gradient, and no operation more."""
    for name in ("elu1", "elu"):
        formula, _, _ = traced(name)
        values = lowered([*formula.outputs, *formula.gradients])
        assert sorted(x.op for x in in_order(values) if x.operands) == ["add", "exp", "max", "min", "mul"]


def test_the_same_formula_has_the_same_name():
    first, second = (traced("directions")[0] for _ in range(2))
    assert first.digest == second.digest != traced("power")[0].digest
    assert triton_source(first) == triton_source(second)


def test_other_tensors_stand_for_those_held():
    formula, _, _ = traced("power")
    other = [x.detach() + 1 for x in formula.tensors]
    assert torch.equal(formula.parameter_tensors(other)[0], other[0].sigmoid().reshape(HEADS, WIDTH))


def check_generated(formula):
    """A formula with head-wise norms and learned tensors: values and gradients of x and both tensors."""
    example = Example(
        lambda x, scalar, channels: written(("add", "x", formula), x, scalar, channels).expand_as(x),
        {"scalar": (HEADS, 1, 1), "channels": (WIDTH,)},
    )
    MAPS["generated"] = example
    try:
        traced_formula, _, learned = traced("generated")
        actual, exact = by_values(traced_formula, learned, False), by_torch(example, torch.float64)
    finally:
        del MAPS["generated"]
    triton_source(traced_formula), cpp_source(traced_formula)
    for x, y in zip(actual, exact, strict=True):
        scale = max(y.abs().max().item(), 1)
        torch.testing.assert_close(x.double() / scale, y / scale, rtol=0, atol=1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(FORMULAS)
def test_generated_formulas(formula):
    check_generated(formula)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(FORMULAS)
def test_many_generated_formulas(formula):
    check_generated(formula)


@pytest.fixture
def no_formulas(monkeypatch):
    for name in ("_formulas", "_traces"):
        monkeypatch.setattr(formulas, name, OrderedDict())


def scaled_by(x, factor):
    return torch.relu(x * factor)


def shifted_by(x, factor, shift):
    return torch.relu(x * factor + shift)


def test_new_functions_of_the_same_code_are_traced_up_to_a_limit(no_formulas, monkeypatch):
    monkeypatch.setattr(formulas, "MOST", 3)
    cpu = torch.device("cpu")
    made = [formulas.formula_of(partial(scaled_by, factor=factor), 2, 5, cpu) for factor in (1.5, 2.5, 3.5)]
    assert len({x.digest for x in made}) == 3
    with pytest.raises(Untraceable, match="have been made 3 times"):
        formulas.formula_of(partial(scaled_by, factor=4.5), 2, 5, cpu)
    assert formulas.formula_of(partial(scaled_by, factor=3.5), 2, 5, cpu) is made[2]


def test_new_functions_with_other_tensors_are_not_traced_again(no_formulas, monkeypatch):
    monkeypatch.setattr(formulas, "MOST", 2)
    cpu = torch.device("cpu")
    for _ in range(5):
        factor = torch.rand(5, requires_grad=True).exp()
        formula = formulas.formula_of(partial(scaled_by, factor=factor), 2, 5, cpu)
        assert torch.equal(formula.parameter_rows(2, 5, 5, 0)[0, 0], factor)
    first, second = torch.rand(2, 5)
    for pair, count in (((first, second), 2), ((first, first), 1)):  # the same tensor twice is another function
        formula = formulas.formula_of(partial(shifted_by, factor=pair[0], shift=pair[1]), 2, 5, cpu)
        assert len(formula.parameters) == count
    assert not any(torch.equal(x, factor) for _, kept, _ in formulas._formulas.values() for x in kept.tensors)


def test_code_that_cannot_be_traced_is_not_tried_for_ever(no_formulas):
    calls = []

    def over_tokens(x, factor):
        calls.append(1)
        return x.cumsum(2) * factor

    for _ in range(20):
        with pytest.raises(Untraceable, match="`cumsum`"):
            formulas.formula_of(partial(over_tokens, factor=torch.rand(5)), 2, 5, torch.device("cpu"))
    assert len(calls) <= 8


def test_arguments_by_name_are_told_apart(no_formulas):
    cpu = torch.device("cpu")
    names = ({"factor": 2.0, "shift": 3.0}, {"shift": 2.0, "factor": 3.0})
    one, two = (formulas.formula_of(partial(shifted_by, **numbers), 2, 5, cpu) for numbers in names)
    assert one.digest != two.digest


def test_a_function_that_has_no_hash_is_traced(no_formulas):
    @dataclass
    class Scaled:
        factor: float

        def __call__(self, x):
            return torch.relu(x) * self.factor

    one, two = (formulas.formula_of(Scaled(factor), 2, 5, torch.device("cpu")) for factor in (2.0, 3.0))
    assert one.digest != two.digest


def test_a_module_is_traced_again_with_another_number_and_not_with_another_tensor(no_formulas):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor, self.shift = nn.Parameter(torch.tensor(2.0)), 1.0

        def forward(self, x):
            return torch.relu(x) * self.factor + self.shift

    scaled, made = Scaled(), []
    for change in (lambda: None, lambda: scaled.factor.data.fill_(3)):
        change()
        made.append(formulas.formula_of(scaled, 2, 5, torch.device("cpu")))
    assert len(formulas._formulas) == 1
    scaled.factor = nn.Parameter(torch.tensor(4.0))
    made.append(formulas.formula_of(scaled, 2, 5, torch.device("cpu")))
    assert made[2].tensors[0] is scaled.factor
    assert len(formulas._formulas) == 1
    scaled.shift = 5.0
    assert formulas.formula_of(scaled, 2, 5, torch.device("cpu")).digest != made[2].digest
