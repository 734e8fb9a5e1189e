// How the states of blocks become what each block reads: `mixed` of linvit/ops/state.py, and its gradient.
#pragma once

#include "state.h"

namespace {

// Gradients of a head's S, r, z and u, and of the mean that set its weights.
struct Gradient {
  Sum S, r, z, u;
  std::vector<float> mean;

  Gradient(int64_t width, int64_t value_width)
      : S(width * value_width), r(width), z(width), u(value_width), mean(width) {}

  void add(const Gradient& other) {
    S.add(1, other.S.data()), r.add(1, other.r.data()), z.add(1, other.z.data()), u.add(1, other.u.data());
  }
};

// Of one head: a row for each block, S not centred, r, z, and u relative to the mean of all; their mixtures; and the
// share of block b in that of block i, share[i * count + b].
class Mixture {
 public:
  // own(b) is the state of block b; mixing (count, count).
  template <typename Own>
  Mixture(const float* mixing, int64_t count, Own&& own)
      : count(count), width(own(0).width), value_width(own(0).value_width), mean(value_width),
        rows(count * length()), mixtures(count * length()), share(count * count), mass(count), relative(count * count) {
    float total = 0;
    for (int64_t b = 0; b < count; ++b) total += own(b).n;
    for (int64_t b = 0; b < count; ++b)
      for (int64_t j = 0; j < value_width; ++j) mean[j] += own(b).n / std::max(total, 1.0f) * own(b).u[j];
    for (int64_t b = 0; b < count; ++b) {
      const State& state = own(b);
      float *S = &rows[b * length()], *r = S + width * value_width, *z = r + width, *apart = z + width;
      for (int64_t j = 0; j < value_width; ++j) apart[j] = state.n > 0 ? state.u[j] - mean[j] : 0.0f;
      std::copy(state.r.begin(), state.r.end(), r);
      std::copy(state.z.begin(), state.z.end(), z);
      for (int64_t i = 0; i < width; ++i)
        for (int64_t j = 0; j < value_width; ++j)
          S[i * value_width + j] = state.S[i * value_width + j] + r[i] * apart[j];
    }
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t b = 0; b < count; ++b) mass[i] += mixing[i * count + b] * own(b).n;
      for (int64_t b = 0; b < count && mass[i] > 0; ++b) {
        relative[i * count + b] = own(b).n / mass[i];
        share[i * count + b] = mixing[i * count + b] * relative[i * count + b];
      }
    }
    multiply(share.data(), count, 1, rows.data(), length(), mixtures.data(), count, count);
  }

  // What block i reads.
  State of(int64_t block) const {
    State state(width, value_width);
    const float *S = &mixtures[block * length()], *r = S + width * value_width, *z = r + width, *apart = z + width;
    std::copy_n(r, width, state.r.begin());
    std::copy_n(z, width, state.z.begin());
    for (int64_t j = 0; j < value_width; ++j) state.u[j] = mass[block] > 0 ? mean[j] + apart[j] : 0.0f;
    for (int64_t i = 0; i < width; ++i)
      for (int64_t j = 0; j < value_width; ++j)
        state.S[i * value_width + j] = S[i * value_width + j] - r[i] * apart[j];
    state.n = mass[block];
    return state;
  }

  // From the gradients of mixtures, gradient(i), to those of the blocks' states in their place, and of the matrix.
  template <typename Of>
  void backward(Of&& gradient, float* grad_mixing) const {
    const int64_t square = width * value_width;
    std::vector<float> given(count * length()), grads(count * length());
    for (int64_t i = 0; i < count; ++i) {
      Gradient& of_mixture = gradient(i);
      float *S = &given[i * length()], *r = S + square, *z = r + width, *apart = z + width;
      const float *r_mixed = &mixtures[i * length()] + square, *apart_mixed = r_mixed + 2 * width;
      std::copy(of_mixture.S.begin(), of_mixture.S.end(), S);
      std::copy(of_mixture.z.begin(), of_mixture.z.end(), z);
      std::copy(of_mixture.u.begin(), of_mixture.u.end(), apart);
      for (int64_t c = 0; c < width; ++c) {
        const float* row = S + c * value_width;
        float product = 0;
        for (int64_t j = 0; j < value_width; ++j) product += row[j] * apart_mixed[j];
        r[c] = of_mixture.r[c] - product;
        for (int64_t j = 0; j < value_width; ++j) apart[j] -= row[j] * r_mixed[c];
      }
    }
    multiply(share.data(), 1, count, given.data(), length(), grads.data(), count, count);
    for (int64_t b = 0; b < count; ++b) {
      Gradient& of_block = gradient(b);
      const float *S = &grads[b * length()], *r = S + square, *z = r + width, *apart = z + width;
      const float *r_own = &rows[b * length()] + square, *apart_own = r_own + 2 * width;
      std::copy_n(S, square, of_block.S.begin());
      std::copy_n(z, width, of_block.z.begin());
      std::copy_n(apart, value_width, of_block.u.begin());
      for (int64_t c = 0; c < width; ++c) {
        const float* row = S + c * value_width;
        float product = 0;
        for (int64_t j = 0; j < value_width; ++j) product += row[j] * apart_own[j];
        of_block.r[c] = r[c] + product;
        for (int64_t j = 0; j < value_width; ++j) of_block.u[j] += row[j] * r_own[c];
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      std::vector<float> by_share(count);
      float centre = 0;
      for (int64_t b = 0; b < count; ++b) {
        const float *x = &given[i * length()], *y = &rows[b * length()];
        Vector sum{};
        for (int64_t c = 0; c < length(); c += LANES) sum += load(x + c) * load(y + c);
        by_share[b] = sum_of<LANES>(sum);
        centre += share[i * count + b] * by_share[b];
      }
      for (int64_t b = 0; b < count; ++b)
        grad_mixing[i * count + b] += relative[i * count + b] * (by_share[b] - centre);
    }
  }

 private:
  const int64_t count, width, value_width;
  std::vector<float> mean, rows, mixtures, share, mass, relative;

  int64_t length() const { return (width + 1) * value_width + 2 * width; }
};

}  // namespace
