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

// Gain and level of linvit/formulas/normalizer.py, and their derivatives by den and num; gain does not depend on num.
struct Setting {
  float gain, level, gain_by_den, level_by_num, level_by_den;
};

Setting divide(float num, float den, float, float, float eps) {
  const float gain = 1 / (den + eps);
  return {gain, num * gain, -gain * gain, gain, -num * gain * gain};
}
Setting magnitude(float num, float den, float, float scale, float eps) {
  const float share = scale / (scale * den + eps), slope = -share * share;
  return {scale + share, scale * (num - den) + share * num, slope, scale + share, slope * num - scale};
}
Setting subtract(float num, float den, float, float scale, float) {
  return {scale, scale * (num - den) + 1, 0, scale, -scale};
}
Setting none(float num, float, float, float, float) { return {1, num, 0, 1, 0}; }
Setting total(float num, float, float mass, float, float) { return {mass, mass * num, 0, mass, 0}; }

template <Setting (*rule)(float, float, float, float, float)>
struct ByQuery {
  static void forward(const float* num, const float* den, float mass, float scale, float eps, float* gain, float* level,
                      int64_t count, const float*) {
    in_order(count, [=](int64_t t) {
      const Setting set = rule(num[t], den[t], mass, scale, eps);
      gain[t] = set.gain, level[t] = set.level;
    });
  }
  static void backward(const float* dgain, const float* dlevel, const float* num, const float* den, float mass,
                       float scale, float eps, float* dnum, float* dden, int64_t count, const float*, float*) {
    in_order(count, [=](int64_t t) {
      const Setting set = rule(num[t], den[t], mass, scale, eps);
      dnum[t] = dlevel[t] * set.level_by_num, dden[t] = dgain[t] * set.gain_by_den + dlevel[t] * set.level_by_den;
    });
  }
  // Causal rows come one by one, without what a loop of vectors costs to begin with.
  template <typename Step>
  static void in_order(int64_t count, Step&& step) {
    if (count == 1) return step(0);
#pragma GCC ivdep
    for (int64_t t = 0; t < count; ++t) step(t);
  }
  static constexpr Normalizer normalizer{forward, backward};
};

const Normalizer* const NORMALIZERS[] = {&ByQuery<divide>::normalizer, &ByQuery<magnitude>::normalizer,
                                         &ByQuery<subtract>::normalizer, &ByQuery<none>::normalizer,
                                         &ByQuery<total>::normalizer};

}  // namespace
