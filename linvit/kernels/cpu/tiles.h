// Tiles of tokens: vectors of floats, products that stay in registers, rotation.
#pragma once

#include <ATen/Tensor.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16, PANEL = 4;
#elif defined(__AVX2__)
constexpr int LANES = 8, PANEL = 2;
#else
constexpr int LANES = 4, PANEL = 4;
#endif
constexpr int ROWS = 6;  // ROWS x PANEL vectors of sums stay in registers
constexpr int TILE = 54;  // tokens: whole blocks of ROWS, and one tile for 7 × 7
constexpr int AHEAD = 16;  // tokens that are fetched before they are read

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(float))));

Vector load(const float* x) {
  Vector v;
  std::memcpy(&v, x, sizeof v);
  return v;
}

void store(float* x, Vector v) { std::memcpy(x, &v, sizeof v); }

template <int lanes>
float sum_of(float __attribute__((vector_size(lanes * sizeof(float)))) v) {
  if constexpr (lanes == 1) {
    return v[0];
  } else {
    typedef float Half __attribute__((vector_size(lanes / 2 * sizeof(float))));
    Half parts[2];
    std::memcpy(parts, &v, sizeof v);
    return sum_of<lanes / 2>(parts[0] + parts[1]);
  }
}

const Vector LOWEST = Vector{} - 87.33654f, HIGHEST = Vector{} + 88.72283f;  // where e^x is a normal number

// e^x to within two roundings (Cephes), from LOWEST to HIGHEST.
Vector exp_within(Vector x) {
  const Vector magic = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const Vector shifted = x * 1.44269504088896341f + magic;
  const Vector n = shifted - magic;
  const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Integers bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + (127 << 23);  // the low bits of `shifted` are n
  Vector power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// e^x; zero below the normal numbers, infinity above the largest.
Vector exp_of(Vector x) {
  const Integers under = x < LOWEST, over = x > HIGHEST;
  const Vector y = exp_within(under ? LOWEST : over ? HIGHEST : x);
  return over ? Vector{} + std::numeric_limits<float>::infinity() : (under ? Vector{} : y);
}

// c[r, :] += sum over s of a[r * row + s * step] * b[s, :], for R rows and V vectors of columns.
template <int R, int V>
void multiply_block(const float* a, int64_t row, int64_t step, const float* b, int64_t width, float* c, int64_t steps) {
  Vector sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = load(c + r * width + v * LANES);
  for (int64_t s = 0; s < steps; ++s) {
    Vector columns[V];
    for (int v = 0; v < V; ++v) columns[v] = load(b + s * width + v * LANES);
    for (int r = 0; r < R; ++r) {
      const float x = a[r * row + s * step];
      for (int v = 0; v < V; ++v) sums[r][v] += x * columns[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(c + r * width + v * LANES, sums[r][v]);
}

template <int V>
void multiply_panel(const float* a, int64_t row, int64_t step, const float* b, int64_t width, float* c, int64_t rows,
                    int64_t steps) {
  int64_t r = 0;
  for (; r + ROWS <= rows; r += ROWS) multiply_block<ROWS, V>(a + r * row, row, step, b, width, c + r * width, steps);
  a += r * row;
  c += r * width;
  switch (rows - r) {
    case 5: return multiply_block<5, V>(a, row, step, b, width, c, steps);
    case 4: return multiply_block<4, V>(a, row, step, b, width, c, steps);
    case 3: return multiply_block<3, V>(a, row, step, b, width, c, steps);
    case 2: return multiply_block<2, V>(a, row, step, b, width, c, steps);
    case 1: return multiply_block<1, V>(a, row, step, b, width, c, steps);
    default: return;
  }
}

// c (rows, width) += a b: a's element (r, s) lies at r * row + s * step, b is (steps, width); width in whole vectors.
void multiply(const float* a, int64_t row, int64_t step, const float* b, int64_t width, float* c, int64_t rows,
              int64_t steps) {
  int64_t column = 0;
  for (; column + PANEL * LANES <= width; column += PANEL * LANES)
    multiply_panel<PANEL>(a, row, step, b + column, width, c + column, rows, steps);
  for (; column + 2 * LANES <= width; column += 2 * LANES)
    multiply_panel<2>(a, row, step, b + column, width, c + column, rows, steps);
  for (; column < width; column += LANES)
    multiply_panel<1>(a, row, step, b + column, width, c + column, rows, steps);
}

int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t columns) {
  std::vector<float> out(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = x[i * columns + j];
  return out;
}

// One head of a tensor (tokens, width) in memory, any strides.
struct Head {
  void* data;
  at::ScalarType dtype;
  int64_t token, channel, width;
};

Head head_of(const at::Tensor& x, int64_t batch, int64_t head) {
  const int64_t offset = batch * x.stride(0) + head * x.stride(1);
  return {static_cast<char*>(x.data_ptr()) + offset * x.element_size(), x.scalar_type(), x.stride(2), x.stride(3),
          x.size(3)};
}

// Calls work(the head's data, as they are): float32, bfloat16 or float16.
template <typename Work>
void by_dtype(const Head& x, Work&& work) {
  switch (x.dtype) {
    case at::kFloat: return work(static_cast<float*>(x.data));
    case at::kBFloat16: return work(static_cast<at::BFloat16*>(x.data));
    default: return work(static_cast<at::Half*>(x.data));
  }
}

void fetch_ahead(const void* data, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(static_cast<const char*>(data) + byte);
}

// soon: the token that is fetched because it is read AHEAD tokens later.
void read_token(const Head& x, int64_t token, int64_t soon, float* out, int64_t width) {
  by_dtype(x, [&](const auto* data) {
    const auto* source = data + token * x.token;
    if (x.channel == 1) {
      fetch_ahead(data + soon * x.token, x.width * sizeof *data);
      for (int64_t c = 0; c < x.width; ++c) out[c] = static_cast<float>(source[c]);
    } else {
      for (int64_t c = 0; c < x.width; ++c) out[c] = static_cast<float>(source[c * x.channel]);
    }
  });
  for (int64_t c = x.width; c < width; ++c) out[c] = 0;
}

// A token as floats with zeros up to whole vectors: where it lies, if it lies so, or read into `room`.
const float* token_at(const Head& x, int64_t token, int64_t soon, float* room, int64_t width) {
  if (x.dtype == at::kFloat && x.channel == 1 && x.width == width) {
    const float* data = static_cast<const float*>(x.data);
    fetch_ahead(data + soon * x.token, width * sizeof *data);
    return data + token * x.token;
  }
  read_token(x, token, soon, room, width);
  return room;
}

struct Table {
  const float *cos, *sin;  // (tokens, width / 2); null without rotation
};

void rotate(const float* x, float* out, const Table& table, int64_t token, int64_t real) {
  const float *cos = table.cos + token * (real / 2), *sin = table.sin + token * (real / 2);
  for (int64_t pair = 0; pair < real / 2; ++pair) {
    const float even = x[2 * pair], odd = x[2 * pair + 1];
    out[2 * pair] = even * cos[pair] - odd * sin[pair];
    out[2 * pair + 1] = even * sin[pair] + odd * cos[pair];
  }
}

// The gradient of rotate: turns the other way, and adds.
void rotate_back(const float* x, float* out, const Table& table, int64_t token, int64_t real) {
  const float *cos = table.cos + token * (real / 2), *sin = table.sin + token * (real / 2);
  for (int64_t pair = 0; pair < real / 2; ++pair) {
    const float even = x[2 * pair], odd = x[2 * pair + 1];
    out[2 * pair] += even * cos[pair] + odd * sin[pair];
    out[2 * pair + 1] += odd * cos[pair] - even * sin[pair];
  }
}

void write_token(const Head& x, int64_t token, const float* values) {
  by_dtype(x, [&](auto* data) {
    auto* target = data + token * x.token;
    for (int64_t c = 0; c < x.width; ++c) target[c] = values[c];
  });
}

}  // namespace
