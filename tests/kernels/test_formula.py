"""Traced formulas: their values and those of their C++, derivatives included, against torch in float64."""

import ctypes
import subprocess

import pytest
import torch
from formula_examples import (
    EPS,
    HEADS,
    MAPS,
    RULES,
    SCALE,
    WIDTH,
    assert_as_good_as_torch,
    by_torch,
    gradients,
    held,
    inputs,
    rows,
    traced,
)

from linvit.kernels.formula.cpp_source import FLAGS, cpp_source
from linvit.kernels.formula.values import evaluate

EXAMPLES = [(name, False) for name in MAPS] + [(name, True) for name in RULES]


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
    given = {"x": like, **given}
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
    F::forward(x + t, y + t, width, parameters);
    F::backward(x + t, dy + t, dx + t, width, parameters, sums);
    if constexpr (F::elementwise) {  // the same once more, number by number
      for (int64_t c = t; c < t + width; ++c) {
        float slope = F::slope(x[c]);
        if constexpr (F::slope_from_value) slope = F::slope_of_value(F::value(x[c]));
        y[c] = (y[c] + F::value(x[c])) / 2, dx[c] = (dx[c] + slope * dy[c]) / 2;
      }
    }
  }
}
template <typename F> void rule(const float* const* given, float* gain, float* level, float* dnum, float* dden,
                                int64_t tokens, float scale, float eps, const float* const* parameters,
                                float* const* sums) {
  for (int64_t t = 0; t < tokens; ++t) {
    const float num = given[0][t], den = given[1][t], mass = given[2][t];
    const auto out = F::forward(num, den, mass, scale, eps, parameters);
    const auto d = F::backward(given[3][t], given[4][t], num, den, mass, scale, eps, parameters, sums);
    gain[t] = out[0], level[t] = out[1], dnum[t] = d[0], dden[t] = d[1];
  }
}
extern "C" {
"""
MAP = """void forward_{0}(const float* x, const float* dy, float* y, float* dx, int64_t tokens, int64_t width,
                    const float* const* parameters, float* const* sums) {{
  map<formula_{0}>(x, dy, y, dx, tokens, width, parameters, sums); }}
"""
RULE = """void forward_{0}(const float* const* given, float* gain, float* level, float* dnum, float* dden, int64_t tokens,
                    float scale, float eps, const float* const* parameters, float* const* sums) {{
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
    flags = [*FLAGS, "-Wall", "-Wno-unused-variable", "-shared", "-fPIC"]
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
