"""Formulas as C++ of the standard library alone, in loops that compilers turn into vectors."""

import math
from collections.abc import Sequence

from linvit.formulas.device import lowered, ranges
from linvit.formulas.trace import Formula
from linvit.formulas.values import CHANNEL, OPERATIONS, REDUCTIONS, Value, in_order

WIDEST = 1024
"""Channels of a head, at most: numbers of a token are kept on the stack."""
COSTLY = ("exp", "log", "sqrt", "sin", "cos", "erf", "div")  # that are kept rather than computed again
HEADER = """#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "formula.h"

namespace linvit_formula {

inline float max_of(float a, float b) { return (a > b) | (a != a) ? a : b; }
inline float min_of(float a, float b) { return (a < b) | (a != a) ? a : b; }

// Without a branch, into which compilers would move what is computed for it, so that it is no vector any more.
inline float select(bool condition, float a, float b) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(a) & mask) | (std::bit_cast<uint32_t>(b) & ~mask));
}

// e^x to within two roundings (Cephes), for x that is at most 88.72; about zero below the normal numbers.
inline float exp_below(float x) {
  const float low = -87.33654f, magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const float within = x < low ? low : x;
  const float shifted = within * 1.44269504088896341f + magic, n = shifted - magic;
  const float r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
}

inline float exp_of(float x) {
  const float low = -87.33654f, high = 88.72283f, y = exp_below(x > high ? high : x);
  return x > high ? INFINITY : x < low ? 0.0f : y;
}

// The natural logarithm to within two roundings (Cephes).
inline float log_of(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const uint32_t bits = std::bit_cast<uint32_t>(tiny ? x * 8388608.0f : x);
  float n = static_cast<float>(static_cast<int32_t>(bits >> 23) - 126) - (tiny ? 23.0f : 0.0f);
  float m = std::bit_cast<float>((bits & 0x7fffffu) | 0x3f000000u);  // from 0.5 to 1
  const bool less = m < 0.707106781186547524f;
  n = less ? n - 1.0f : n;
  m = less ? m + m - 1.0f : m - 1.0f;
  const float square = m * m;
  float p = m * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float y = m + (p * m * square - n * 2.12194440e-4f - 0.5f * square) + n * 0.693359375f;
  const float other = select(x < 0.0f, NAN, x - INFINITY);  // of zero, and of what is not a number
  return select(x > 0.0f, select(x < INFINITY, y, x), other);
}

"""


TABLE = "linvit_table"
OF_A_MAP = """
  static void forward(const float* x, float* y, int64_t width, const float* p) {{
    const float* const parameters[] = {{{places}}};
    values(x, y, width, parameters);
  }}
  static void backward(const float* x, const float* dy, float* dx, int64_t width, const float* p, float* s) {{
    const float* const parameters[] = {{{places}}};
    float* const sums[] = {{{sums}}};
    gradients(x, dy, dx, width, parameters, sums);
  }}
  static constexpr linvit::Map table{{forward, backward}};
"""
OF_A_NORMALIZER = """
  // Causal rows come one by one, without what a loop of vectors costs to begin with.
  template <typename Step>
  static void in_order(int64_t count, Step&& step) {{
    if (count == 1) return step(0);
#pragma GCC ivdep
    for (int64_t t = 0; t < count; ++t) step(t);
  }}
  static void forward(const float* num, const float* den, float mass, float scale, float eps, float* gain,
                      float* level, int64_t count, const float* p) {{
    const float* const parameters[] = {{{places}}};
    in_order(count, [&](int64_t t) {{
      const auto out = values(num[t], den[t], mass, scale, eps, parameters);
      gain[t] = out[0], level[t] = out[1];
    }});
  }}
  static void backward(const float* dgain, const float* dlevel, const float* num, const float* den, float mass,
                       float scale, float eps, float* dnum, float* dden, int64_t count, const float* p, float* s) {{
    const float* const parameters[] = {{{places}}};
    float* const sums[] = {{{sums}}};
    in_order(count, [&](int64_t t) {{
      const auto d = gradients(dgain[t], dlevel[t], num[t], den[t], mass, scale, eps, parameters, sums);
      dnum[t] = d[0], dden[t] = d[1];
    }});
  }}
  static constexpr linvit::Normalizer table{{forward, backward}};
"""


def cpp_source(*formulas: Formula) -> str:
    """Structs `formula_DIGEST` in the namespace linvit_formula, whose `table` is what `formula.h` declares.

    Their functions over rows, of a map over the channels of a token; y may be x, and dx may be dy:

        values(x, y, width, parameters)
        gradients(x, dy, dx, width, parameters, sums)        adds to `sums`

    and over single numbers of a normalizer, with std::array<float, 2> of gain and level, and of dnum and dden:

        values(num, den, mass, scale, eps, parameters)
        gradients(dgain, dlevel, num, den, mass, scale, eps, parameters, sums)

    In the tables parameters lie one row after another, and so do sums.
    """
    functions = {x.digest: (_map_functions(x) if x.is_map else _normalizer_functions(x)) + _table(x) for x in formulas}
    structs = "".join(f"struct formula_{digest} {{\n{text}}};\n\n" for digest, text in functions.items())
    return f"{HEADER}{structs}}}  // namespace linvit_formula\n"


def _table(formula: Formula) -> str:
    def places(pointer: str, count: int) -> str:
        step = " * width" if formula.is_map else ""
        return ", ".join(f"{pointer} + {i}{step}" for i in range(count)) or "nullptr"

    template = OF_A_MAP if formula.is_map else OF_A_NORMALIZER
    return template.format(places=places("p", len(formula.parameters)), sums=places("s", len(formula.sums)))


def library_source(formula: Formula) -> str:
    """The source of a library that has the table under the name TABLE."""
    kind = "Map" if formula.is_map else "Normalizer"
    table = f'extern "C" {{ linvit::{kind} {TABLE} = linvit_formula::formula_{formula.digest}::table; }}'
    return f"{cpp_source(formula)}\n{table}\n"


def named_source(maps: Sequence[Formula], normalizers: Sequence[Formula]) -> str:
    """The header named.h: pointers to the tables of formulas that have names, in this order."""

    def array(kind: str, name: str, formulas: Sequence[Formula]) -> str:
        tables = ", ".join(f"&linvit_formula::formula_{formula.digest}::table" for formula in formulas)
        return f"static const linvit::{kind}* const {name}[] = {{{tables}}};\n"

    arrays = array("Map", "MAPS", maps) + array("Normalizer", "NORMALIZERS", normalizers)
    return f"{cpp_source(*maps, *normalizers)}\n{arrays}"


def _map_functions(formula: Formula) -> str:
    parameters = "int64_t width, const float* const* parameters"
    sums = [(f"sum{i}" if varies else f"sums[{i}]", value, varies) for i, (value, varies) in enumerate(formula.sums)]
    text = f"  static void values(const float* x, float* y, {parameters}) {{\n"
    text += _loops([("y", formula.outputs[0], True)], [])
    text += (
        f"  static void gradients(const float* x, const float* dy, float* dx, {parameters}, float* const* sums) {{\n"
    )
    return text + _loops([("dx", formula.gradients[0], True)], sums)


def _normalizer_functions(formula: Formula) -> str:
    names = ", ".join(f"float {name}" for name in formula.names)
    d = ", ".join(f"float d{name}" for name in formula.results)
    pair = "std::array<float, 2>"
    text = _number_function(f"{pair} values({names}, const float* const* parameters)", formula.outputs)
    sums = [value for value, _ in formula.sums]
    heading = f"{pair} gradients({d}, {names}, const float* const* parameters, float* const* sums)"
    return text + _number_function(heading, formula.gradients, sums)


def _number_function(heading: str, outputs: Sequence[Value], sums: Sequence[Value] = ()) -> str:
    """A function of single numbers."""
    values = lowered([*outputs, *sums])
    names = _names(values)
    lines = [f"    {_statement(x, names)}" for x in in_order(values) if x.operands]
    lines += [f"    *sums[{i}] += {names[x]};" for i, x in enumerate(values[len(outputs) :])]
    results = [names[x] for x in values[: len(outputs)]]
    result = results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"
    return "\n".join([f"  static {heading} {{", *lines, f"    return {result};", "  }", ""])


def _names(values: Sequence[Value]) -> dict[Value, str]:
    names = {}
    for index, value in enumerate(in_order(values)):
        place = value.data.removeprefix("parameter") if value.op == "input" else ""
        if place.isdigit():
            names[value] = f"{value.data}[c]" if value.axes else f"*parameters[{place}]"
        else:
            names[value] = value.data if value.op == "input" else f"t{index}"
        if value.op == "constant":
            names[value] = _number(value.data)
    return names


def _number(number: float | bool) -> str:
    if isinstance(number, bool):
        return "true" if number else "false"
    if math.isnan(number):
        return "NAN"
    return f"{number!r}f" if math.isfinite(number) else "INFINITY" if number > 0 else "-INFINITY"


def _statement(value: Value, names: dict[Value, str]) -> str:
    text = OPERATIONS[value.op].cpp
    if value.op in ("max", "min") and value.operands[1].op == "constant":
        text = "select({0} <= {1}, {1}, {0})" if value.op == "max" else "select({0} >= {1}, {1}, {0})"
    if value.op == "exp" and ranges(value.operands)[value.operands[0]][1] <= 88:
        text = "exp_below({})"
    text = text.format(*(names[operand] for operand in value.operands))
    return f"const {'bool' if value.is_condition else 'float'} {names[value]} = {text};"


def _loops(rows: Sequence[tuple[str, Value, bool]], sums: Sequence[tuple[str, Value, bool]]) -> str:
    """The body of a function over the channels of a token: a loop, and one more after each reduction.

    rows, sums: a target, what is written or added there, and whether the target has channels.
    """
    values = lowered([value for _, value, _ in (*rows, *sums)])
    names, order = _names(values), in_order(values)
    names = {x: f"{name}[c]" if name in ("x", "dy") else name for x, name in names.items()}
    stage: dict[Value, int] = {}
    for value in order:
        latest = max((stage[operand] for operand in value.operands), default=0)
        stage[value] = latest + (value.op in REDUCTIONS)
    last = max(stage.values())
    bodies, kept = _bodies(values, order, stage, last, names)
    lines = [f"    float {names[x]}s[{WIDEST}];" for x in kept]
    lines += [
        f"    const float* {x.data} = parameters[{x.data[9:]}];" for x in order if names[x].startswith("parameter")
    ]
    lines += [f"    float* {target} = sums[{target[3:]}];" for target, _, varies in sums if varies]
    for index in range(last + 1):
        lines += [
            f"    {_statement(x, names)}"
            for x in order
            if x.operands and not x.axes & CHANNEL and x.op not in REDUCTIONS and stage[x] == index
        ]
        reduced = [x for x in order if x.op in REDUCTIONS and stage[x] == index + 1]
        starts = {"sum": "0.0f", "amax": "-INFINITY", "amin": "INFINITY"}
        lines += [f"    float {names[x]} = {starts[x.op]};" for x in reduced]
        body = bodies[index] + [
            f"{names[x]} = {OPERATIONS[x.op].cpp.format(names[x], names[x.operands[0]])};" for x in reduced
        ]
        if index == last:
            for (target, _, varies), value in zip(sums, values[len(rows) :], strict=True):
                if varies:
                    body.append(f"{target}[c] += {names[value]};")
                else:
                    lines.append(f"    *{target} += {names[value]};")
            # Last, because they may be written over what is read.
            body += [f"{target}[c] = {names[value]};" for (target, _, _), value in zip(rows, values, strict=False)]
        signs = {"sum": "+", "amax": "max", "amin": "min"}
        clauses = "".join(f" reduction({signs[x.op]} : {names[x]})" for x in reduced)
        lines += [f"#pragma omp simd{clauses}", "    for (int64_t c = 0; c < width; ++c) {"]
        lines += [*(f"      {line}" for line in body), "    }"]
    return "\n".join([*lines, "  }", ""])


def _bodies(
    values: Sequence[Value], order: Sequence[Value], stage: dict[Value, int], last: int, names: dict[Value, str]
) -> tuple[list[list[str]], list[Value]]:
    """The statements of each loop, and the values that a later loop reads again."""
    first: dict[Value, int] = {}  # the loop that computes it
    kept: dict[Value, None] = {}
    bodies = []
    for index in range(last + 1):
        needed: dict[Value, None] = {}
        pending = [x.operands[0] for x in order if x.op in REDUCTIONS and stage[x] == index + 1]
        pending += values if index == last else []
        while pending:
            value = pending.pop()
            if value.operands and value.axes & CHANNEL and value not in needed:
                needed[value] = None
                if first.setdefault(value, index) < index and value.op in COSTLY:
                    kept[value] = None
                else:
                    pending.extend(value.operands)
        bodies.append([x for x in order if x in needed])
    texts: list[list[str]] = []
    for index, body in enumerate(bodies):
        texts.append([])
        for value in body:
            if value in kept and first[value] < index:
                texts[-1].append(f"const float {names[value]} = {names[value]}s[c];")
            else:
                texts[-1].append(_statement(value, names))
                texts[-1] += [f"{names[value]}s[c] = {names[value]};"] if value in kept else []
    return texts, list(kept)
