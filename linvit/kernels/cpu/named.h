// The formulas that have names, in the order of linvit/kernels/support.py.
#pragma once

#include "formula.h"
#include "tiles.h"

namespace {

using linvit::Map, linvit::Normalizer;

const Vector ZERO = Vector{}, ONE = Vector{} + 1.0f;

Vector elu1(Vector x) { return x > ZERO ? x + 1.0f : exp_within(x > ZERO ? ZERO : x < LOWEST ? LOWEST : x); }
Vector elu1_slope(Vector x) { return exp_within(x > ZERO ? ZERO : x < LOWEST ? LOWEST : x); }
Vector relu(Vector x) { return x < ZERO ? ZERO : x; }
Vector relu_slope(Vector x) { return x > ZERO ? ONE : ZERO; }
Vector identity(Vector x) { return x; }
Vector identity_slope(Vector) { return ONE; }

// Rows of the kernel have room for whole vectors.
template <Vector (*value)(Vector), Vector (*slope)(Vector)>
struct Pointwise {
  static void forward(const float* x, float* y, int64_t width, const float*) {
    for (int64_t c = 0; c < width; c += LANES) store(y + c, value(load(x + c)));
  }
  static void backward(const float* x, const float* dy, float* dx, int64_t width, const float*, float*) {
    for (int64_t c = 0; c < width; c += LANES) store(dx + c, load(dy + c) * slope(load(x + c)));
  }
  static constexpr Map map{forward, backward};
};

const Map* const MAPS[] = {&Pointwise<elu1, elu1_slope>::map, &Pointwise<relu, relu_slope>::map,
                           &Pointwise<exp_of, exp_of>::map, &Pointwise<identity, identity_slope>::map};

struct Pair {
  float first, second;
};

struct Divide {
  static Pair values(float num, float den, float, float, float eps) {
    const float gain = 1 / (den + eps);
    return {gain, num * gain};
  }
  static Pair gradients(float dgain, float dlevel, float num, float den, float, float, float eps) {
    const float gain = 1 / (den + eps);
    return {dlevel * gain, -(dgain + dlevel * num) * gain * gain};
  }
};

struct Magnitude {
  static Pair values(float num, float den, float, float scale, float eps) {
    const float share = scale / (scale * den + eps);
    return {scale + share, scale * (num - den) + share * num};
  }
  static Pair gradients(float dgain, float dlevel, float num, float den, float, float scale, float eps) {
    const float share = scale / (scale * den + eps);
    return {dlevel * (scale + share), -share * share * (dgain + dlevel * num) - dlevel * scale};
  }
};

struct Subtract {
  static Pair values(float num, float den, float, float scale, float) { return {scale, scale * (num - den) + 1}; }
  static Pair gradients(float, float dlevel, float, float, float, float scale, float) {
    return {dlevel * scale, -dlevel * scale};
  }
};

struct None {
  static Pair values(float num, float, float, float, float) { return {1, num}; }
  static Pair gradients(float, float dlevel, float, float, float, float, float) { return {dlevel, 0}; }
};

struct Total {
  static Pair values(float num, float, float mass, float, float) { return {mass, mass * num}; }
  static Pair gradients(float, float dlevel, float, float, float mass, float, float) { return {dlevel * mass, 0}; }
};

// Calls step for each query; causal rows come one by one, without what a loop of vectors costs to begin with.
template <typename Step>
void in_order(int64_t count, Step&& step) {
  if (count == 1) return step(0);
#pragma GCC ivdep
  for (int64_t t = 0; t < count; ++t) step(t);
}

template <typename Rule>
constexpr Normalizer normalizer{
    [](const float* num, const float* den, float mass, float scale, float eps, float* gain, float* level, int64_t count,
       const float*) {
      in_order(count, [=](int64_t t) {
        const Pair pair = Rule::values(num[t], den[t], mass, scale, eps);
        gain[t] = pair.first, level[t] = pair.second;
      });
    },
    [](const float* dgain, const float* dlevel, const float* num, const float* den, float mass, float scale, float eps,
       float* dnum, float* dden, int64_t count, const float*, float*) {
      in_order(count, [=](int64_t t) {
        const Pair pair = Rule::gradients(dgain[t], dlevel[t], num[t], den[t], mass, scale, eps);
        dnum[t] = pair.first, dden[t] = pair.second;
      });
    }};

const Normalizer* const NORMALIZERS[] = {&normalizer<Divide>, &normalizer<Magnitude>, &normalizer<Subtract>,
                                         &normalizer<None>, &normalizer<Total>};

}  // namespace
