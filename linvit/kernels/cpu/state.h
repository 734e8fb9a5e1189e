// What a head keeps of the tokens it has read, and what a query does with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "tiles.h"

namespace {

// Sums or means, and what rounding has left out of them, which would add up over many steps.
struct Sum : std::vector<float> {
  std::vector<float> rest;

  explicit Sum(int64_t width) : std::vector<float>(width), rest(width) {}

  // Adds scale * x.
  void add(float scale, const float* x) {
    for (size_t c = 0; c < size(); ++c) step(c, scale * x[c]);
  }
  // Of means, which keep a share of their weight, to those of all: from the nearer end, because the rounding of a large
  // share would weigh what has almost no weight but may be large.
  void towards(const float* means, float share, float kept) {
    for (size_t c = 0; c < size(); ++c) {
      const float apart = means[c] - (*this)[c];
      if (share < 0.5f) {
        step(c, share * apart);
      } else {
        (*this)[c] = means[c] - kept * apart;
        rest[c] *= kept;
      }
    }
  }

 private:
  void step(size_t c, float x) {
    const float before = (*this)[c], more = rest[c] + x, after = before + more;
    rest[c] = more - (after - before);
    (*this)[c] = after;
  }
};

// What a head keeps of the tokens it has read: State of linvit/ops/state.py, with S as a sum, not yet a mean.
struct State {
  int64_t width, value_width;
  std::vector<float> S;
  Sum z, r, u;
  float n = 0, shift = 0;

  State(int64_t width, int64_t value_width)
      : width(width), value_width(value_width), S(width * value_width), z(width), r(width), u(value_width) {}

  float mass() const { return shift == 0 ? n : n * std::exp(shift); }
};

void weighted_mean(const float* rows, const float* weights, int64_t count, int64_t width, float* out) {
  std::fill(out, out + width, 0.0f);
  multiply(weights, 0, 1, rows, width, out, 1, count);
}

// What the queries of a tile read and how it is weighed, and the gradients of these.
struct Readings {
  float num[TILE], den[TILE], gain[TILE], level[TILE], by_num[TILE], by_den[TILE], by_gain[TILE], by_level[TILE];
};

// Tiles of one thread; one row more than tokens, for the step between the means of a tile and those before it.
struct Scratch {
  const int64_t width, value_width;
  std::vector<float> features, rotated, values, product, z, r, u, weights, source;
  std::vector<int64_t> places;
  Readings readings;

  Scratch(int64_t width, int64_t value_width)
      : width(width),
        value_width(value_width),
        features((TILE + 1) * width),
        rotated((TILE + 1) * width),
        values((TILE + 1) * value_width),
        product(TILE * std::max(width, value_width)),
        z(width),
        r(width),
        u(value_width),
        weights(TILE + 1),
        source(width),
        places(TILE) {}
};

// That of this thread, kept between calls: making one takes as long as a head of 16 tokens.
Scratch& scratch(int64_t width, int64_t value_width) {
  thread_local std::optional<Scratch> kept;
  if (!kept || kept->width != width || kept->value_width != value_width) kept.emplace(width, value_width);
  return *kept;
}

// Lets the state read `count` tokens of the scratch. `mean`, the scaled mean of κ(q), sets their weights; null for equal
// ones. With `transposes`, S has the axes (value width, width).
void absorb(State& state, Scratch& tile, int64_t count, const float* mean, bool rotates, bool transposes = false) {
  const int64_t width = state.width, value_width = state.value_width;
  float* weights = tile.weights.data();
  float n = static_cast<float>(count), shift = state.shift;
  std::fill(weights, weights + count, 1.0f / n);
  if (mean != nullptr) {
    shift = -std::numeric_limits<float>::infinity();
    for (int64_t t = 0; t < count; ++t) {
      Vector dot{};
      for (int64_t c = 0; c < width; c += LANES) dot += load(&tile.features[t * width + c]) * load(mean + c);
      weights[t] = sum_of<LANES>(dot);
      shift = std::max(shift, weights[t]);
    }
    n = 0;
    for (int64_t t = 0; t < count; ++t) n += weights[t] = std::exp(weights[t] - shift);
    for (int64_t t = 0; t < count; ++t) weights[t] /= n;
  }
  if (state.n == 0) {
    state.shift = shift;
    weighted_mean(tile.values.data(), weights, count, value_width, state.u.data());
  }
  const float top = std::max(state.shift, shift);
  const float before = std::exp(state.shift - top), now = std::exp(shift - top);
  if (before != 1) {
    state.n *= before;
    for (float& x : state.S) x *= before;
  }
  state.shift = top;
  n *= now;
  const float share = n / (state.n + n), kept = state.n / (state.n + n);
  const float* rotated = rotates ? tile.rotated.data() : tile.features.data();
  weighted_mean(tile.features.data(), weights, count, width, tile.z.data());
  // Relative to a mean, that of the tile loses little to rounding.
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < value_width; ++c) tile.values[t * value_width + c] -= state.u[c];
  weighted_mean(tile.values.data(), weights, count, value_width, tile.u.data());
  if (rotates) weighted_mean(rotated, weights, count, width, tile.r.data());
  const float* r = rotates ? tile.r.data() : tile.z.data();
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < value_width; ++c)
      tile.values[t * value_width + c] = (tile.values[t * value_width + c] - tile.u[c]) * (weights[t] * n);
  float* step = (rotates ? tile.rotated.data() : tile.features.data()) + count * width;
  for (int64_t c = 0; c < width; ++c) step[c] = r[c] - state.r[c];
  for (int64_t c = 0; c < value_width; ++c)
    tile.values[count * value_width + c] = tile.u[c] * state.n * share;
  if (transposes)
    multiply(tile.values.data(), 1, value_width, rotated, width, state.S.data(), value_width, count + 1);
  else
    multiply(rotated, 1, width, tile.values.data(), value_width, state.S.data(), width, count + 1);
  state.z.towards(tile.z.data(), share, kept);
  state.r.towards(r, share, kept);
  state.u.add(share, tile.u.data());
  state.n += n;
}

void merge(State& first, const State& second) {
  if (second.n == 0) return;
  if (first.n == 0) {
    first = second;
    return;
  }
  const float top = std::max(first.shift, second.shift);
  const float before = std::exp(first.shift - top), now = std::exp(second.shift - top);
  const float n_first = first.n * before, n_second = second.n * now, n = n_first + n_second;
  const float share = n_second / n, kept = n_first / n;
  for (int64_t i = 0; i < first.width; ++i) {
    const float step = (second.r[i] - first.r[i]) * n_first * share;
    for (int64_t j = 0; j < first.value_width; ++j) {
      float& sum = first.S[i * first.value_width + j];
      sum = sum * before + second.S[i * first.value_width + j] * now + step * (second.u[j] - first.u[j]);
    }
  }
  first.z.towards(second.z.data(), share, kept);
  first.r.towards(second.r.data(), share, kept);
  first.u.towards(second.u.data(), share, kept);
  first.n = n;
  first.shift = top;
}

}  // namespace
