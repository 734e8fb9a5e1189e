// Bidirectional linear attention on a CPU, forward. Tiles of tokens are read once, mapped, rotated, weighed and
// multiplied while they lie in a core's first cache; nothing of the inputs' size is written but the output.
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
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
constexpr int TILE = 48;  // tokens
constexpr int AHEAD = 16;  // tokens that are fetched before they are read

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(float))));

enum class Map { elu1, relu, exp, identity };
enum class Normalizer { divide, magnitude, magnitude_no_beta, magnitude_no_gamma, subtract, none, sum };

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

// e^x to within two roundings (Cephes); zero below the normal numbers, infinity above the largest.
Vector exp_of(Vector x) {
  const Vector low = Vector{} - 87.33654f, high = Vector{} + 88.72283f;
  const Integers under = x < low, over = x > high;
  Vector y = under ? low : x;
  y = over ? high : y;
  const Vector magic = Vector{} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
  const Vector shifted = y * 1.44269504088896341f + magic;
  const Vector n = shifted - magic;
  const Vector r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
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
  const Vector y_exp = p * power;
  const Vector infinite = Vector{} + std::numeric_limits<float>::infinity();
  return over ? infinite : (under ? Vector{} : y_exp);
}

template <Map map>
Vector mapped(Vector x) {
  const Vector zero{};
  if constexpr (map == Map::elu1) return x > zero ? x + 1.0f : exp_of(x > zero ? zero : x);
  if constexpr (map == Map::relu) return x < zero ? zero : x;
  if constexpr (map == Map::exp) return exp_of(x);
  return x;
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
  for (; column < width; column += LANES)
    multiply_panel<1>(a, row, step, b + column, width, c + column, rows, steps);
}

int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

// One head of a tensor (tokens, width) in memory, any strides.
template <typename T>
struct Head {
  T* data;
  int64_t token, channel, width;
};

template <typename T>
Head<T> head_of(const at::Tensor& x, int64_t batch, int64_t head) {
  return {x.data_ptr<T>() + batch * x.stride(0) + head * x.stride(1), x.stride(2), x.stride(3), x.size(3)};
}

template <typename T>
void read_token(const Head<T>& x, int64_t token, float* out, int64_t width) {
  const T* source = x.data + token * x.token;
  if (x.channel == 1) {
    for (int64_t c = 0; c < x.width; c += 64 / sizeof(T)) __builtin_prefetch(source + AHEAD * x.token + c);
    for (int64_t c = 0; c < x.width; ++c) out[c] = static_cast<float>(source[c]);
  }
  else {
    for (int64_t c = 0; c < x.width; ++c) out[c] = static_cast<float>(source[c * x.channel]);
  }
  for (int64_t c = x.width; c < width; ++c) out[c] = 0;
}

template <Map map>
void map_row(float* x, int64_t width) {
  for (int64_t c = 0; c < width; c += LANES) store(x + c, mapped<map>(load(x + c)));
}

void map_token(float* x, int64_t real, int64_t width, Map map) {
  switch (map) {
    case Map::elu1: map_row<Map::elu1>(x, width); break;
    case Map::relu: map_row<Map::relu>(x, width); break;
    case Map::exp: map_row<Map::exp>(x, width); break;
    case Map::identity: break;
  }
  for (int64_t c = real; c < width; ++c) x[c] = 0;
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

// What a head keeps of the tokens it has read: State of linvit/ops/state.py, with S as a sum, not yet a mean.
struct State {
  int64_t width, value_width;
  std::vector<float> S, z, r, u;
  float n = 0, shift = 0;

  State(int64_t width, int64_t value_width)
      : width(width), value_width(value_width), S(width * value_width), z(width), r(width), u(value_width) {}
};

// means += share * (mean of the rows of x weighed by w, which sum to one, - means)
void towards(std::vector<float>& means, const float* mean, float share) {
  for (size_t c = 0; c < means.size(); ++c) means[c] += share * (mean[c] - means[c]);
}

void weighted_mean(const float* rows, const float* weights, int64_t count, int64_t width, float* out) {
  std::fill(out, out + width, 0.0f);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < width; ++c) out[c] += weights[t] * rows[t * width + c];
}

// Tiles of one thread; one row more than tokens, for the step between the means of a tile and those before it.
struct Scratch {
  std::vector<float> features, rotated, values, product, z, r, u, weights;

  Scratch(int64_t width, int64_t value_width)
      : features((TILE + 1) * width),
        rotated((TILE + 1) * width),
        values((TILE + 1) * value_width),
        product(TILE * value_width),
        z(width),
        r(width),
        u(value_width),
        weights(TILE + 1) {}
};

// Lets the state read `count` tokens of the scratch; `mean` (scaled mean of κ(q)) sets their weights, null for equal ones.
void absorb(State& state, Scratch& tile, int64_t count, const float* mean, bool rotates) {
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
  if (state.n == 0) state.shift = shift;
  const float top = std::max(state.shift, shift);
  const float before = std::exp(state.shift - top), now = std::exp(shift - top);
  if (before != 1) {
    state.n *= before;
    for (float& x : state.S) x *= before;
  }
  state.shift = top;
  n *= now;
  const float share = n / (state.n + n);
  const float* rotated = rotates ? tile.rotated.data() : tile.features.data();
  weighted_mean(tile.features.data(), weights, count, width, tile.z.data());
  weighted_mean(tile.values.data(), weights, count, value_width, tile.u.data());
  if (rotates) weighted_mean(rotated, weights, count, width, tile.r.data());
  const float* r = rotates ? tile.r.data() : tile.z.data();
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < value_width; ++c)
      tile.values[t * value_width + c] = (tile.values[t * value_width + c] - tile.u[c]) * (weights[t] * n);
  float* step = (rotates ? tile.rotated.data() : tile.features.data()) + count * width;
  for (int64_t c = 0; c < width; ++c) step[c] = r[c] - state.r[c];
  for (int64_t c = 0; c < value_width; ++c)
    tile.values[count * value_width + c] = (tile.u[c] - state.u[c]) * state.n * share;
  multiply(rotated, 1, width, tile.values.data(), value_width, state.S.data(), width, count + 1);
  towards(state.z, tile.z.data(), share);
  towards(state.r, r, share);
  towards(state.u, tile.u.data(), share);
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
  const float share = n_second / n;
  for (int64_t i = 0; i < first.width; ++i) {
    const float step = (second.r[i] - first.r[i]) * n_first * share;
    for (int64_t j = 0; j < first.value_width; ++j) {
      float& sum = first.S[i * first.value_width + j];
      sum = sum * before + second.S[i * first.value_width + j] * now + step * (second.u[j] - first.u[j]);
    }
  }
  towards(first.z, second.z.data(), share);
  towards(first.r, second.r.data(), share);
  towards(first.u, second.u.data(), share);
  first.n = n;
  first.shift = top;
}

struct Gain {
  float gain, level;
};

// As in linvit/ops/normalizer.py.
Gain normalized(Normalizer normalizer, float num, float den, float mass, float scale, float eps) {
  switch (normalizer) {
    case Normalizer::divide: return {1 / (den + eps), num / (den + eps)};
    case Normalizer::magnitude: {
      const float share = scale / (scale * den + eps);
      return {scale + share, scale * (num - den) + share * num};
    }
    case Normalizer::magnitude_no_beta: return {scale, scale * (num - den)};
    case Normalizer::magnitude_no_gamma: {
      const float gain = scale + scale / (scale * den + eps);
      return {gain, gain * num};
    }
    case Normalizer::subtract: return {scale, scale * (num - den) + 1};
    case Normalizer::none: return {1, num};
    default: return {mass, mass * num};
  }
}

struct Rule {
  Map query_map, key_map;
  Normalizer normalizer;
  bool query_mean;
  float eps;
  Table table;
  int64_t width, value_width;  // in whole vectors
};

template <typename T>
void read_queries(const Head<T>& query, const Head<T>& out, const State& state, Scratch& tile, const Rule& rule,
                  int64_t begin, int64_t end) {
  const int64_t width = rule.width, value_width = rule.value_width;
  const bool rotates = rule.table.cos != nullptr;
  const float scale = 1 / std::sqrt(static_cast<float>(query.width)), mass = state.n * std::exp(state.shift);
  for (int64_t start = begin; start < end; start += TILE) {
    const int64_t count = std::min<int64_t>(TILE, end - start);
    for (int64_t t = 0; t < count; ++t) {
      float* features = &tile.features[t * width];
      read_token(query, start + t, features, width);
      map_token(features, query.width, width, rule.query_map);
      if (rotates) rotate(features, &tile.rotated[t * width], rule.table, start + t, query.width);
    }
    const float* rotated = rotates ? tile.rotated.data() : tile.features.data();
    std::fill(tile.product.begin(), tile.product.begin() + count * value_width, 0.0f);
    multiply(rotated, width, 1, state.S.data(), value_width, tile.product.data(), count, width);
    for (int64_t t = 0; t < count; ++t) {
      Vector nums{}, dens{};
      for (int64_t c = 0; c < width; c += LANES) {
        nums += load(rotated + t * width + c) * load(&state.r[c]);
        dens += load(&tile.features[t * width + c]) * load(&state.z[c]);
      }
      const Gain set = normalized(rule.normalizer, sum_of<LANES>(nums), sum_of<LANES>(dens), mass, scale, rule.eps);
      const float *product = &tile.product[t * value_width], *u = state.u.data();
      T* target = out.data + (start + t) * out.token;
      for (int64_t c = 0; c < out.width; ++c) target[c] = static_cast<T>(set.gain * product[c] + set.level * u[c]);
    }
  }
}

template <typename T>
void read_keys(const Head<T>& key, const Head<T>& value, const bool* visible, State& state, Scratch& tile,
               const Rule& rule, const float* mean, int64_t begin, int64_t end) {
  const int64_t width = rule.width, value_width = rule.value_width;
  const bool rotates = rule.table.cos != nullptr;
  int64_t count = 0;
  for (int64_t token = begin; token < end; ++token) {
    if (visible != nullptr && !visible[token]) continue;
    float* features = &tile.features[count * width];
    read_token(key, token, features, width);
    map_token(features, key.width, width, rule.key_map);
    if (rotates) rotate(features, &tile.rotated[count * width], rule.table, token, key.width);
    read_token(value, token, &tile.values[count * value_width], value_width);
    if (++count == TILE) {
      absorb(state, tile, count, mean, rotates);
      count = 0;
    }
  }
  if (count > 0) absorb(state, tile, count, mean, rotates);
}

// Sum of κ(q) over visible tokens, and their number in the last place.
template <typename T>
void sum_queries(const Head<T>& query, const bool* visible, float* sum, Scratch& tile, const Rule& rule, int64_t begin,
                 int64_t end) {
  float* features = tile.features.data();
  for (int64_t token = begin; token < end; ++token) {
    if (visible != nullptr && !visible[token]) continue;
    read_token(query, token, features, rule.width);
    map_token(features, query.width, rule.width, rule.query_map);
    for (int64_t c = 0; c < rule.width; ++c) sum[c] += features[c];
    sum[rule.width] += 1;
  }
}

// Heads are shared out among threads, and tokens where there are fewer heads than threads.
template <typename T>
void attend_typed(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const bool* visible,
                  const Rule& rule, const at::Tensor& out) {
  const int64_t heads = query.size(1), all = query.size(0) * heads, queries = query.size(2), tokens = key.size(2);
  const int64_t parts = std::clamp<int64_t>(at::get_num_threads() / std::max<int64_t>(all, 1), 1, tokens / TILE + 1);
  const auto bounds = [parts](int64_t length, int64_t part) { return length * part / parts; };
  const auto mask = [&](int64_t head) { return visible == nullptr ? nullptr : visible + head * tokens; };
  std::vector<State> states(all * parts, State(rule.width, rule.value_width));
  std::vector<float> sums(rule.query_mean ? all * parts * (rule.width + 1) : 0);
  const auto for_all = [&](auto&& work) {
    at::parallel_for(0, all * parts, 1, [&](int64_t begin, int64_t end) {
      Scratch tile(rule.width, rule.value_width);
      for (int64_t i = begin; i < end; ++i) work(i, i / parts, i % parts, tile);
    });
  };
  if (rule.query_mean) {
    for_all([&](int64_t i, int64_t head, int64_t part, Scratch& tile) {
      sum_queries(head_of<T>(query, head / heads, head % heads), mask(head), &sums[i * (rule.width + 1)], tile, rule,
                  bounds(queries, part), bounds(queries, part + 1));
    });
    const float scale = 1 / std::sqrt(static_cast<float>(query.size(3)));
    for (int64_t head = 0; head < all; ++head) {
      float* total = &sums[head * parts * (rule.width + 1)];
      for (int64_t c = 0; c <= rule.width; ++c)
        for (int64_t part = 1; part < parts; ++part) total[c] += total[part * (rule.width + 1) + c];
      for (int64_t c = 0; c < rule.width; ++c) total[c] *= scale / std::max(total[rule.width], 1.0f);
    }
  }
  for_all([&](int64_t i, int64_t head, int64_t part, Scratch& tile) {
    const float* mean = rule.query_mean ? &sums[head * parts * (rule.width + 1)] : nullptr;
    read_keys(head_of<T>(key, head / heads, head % heads), head_of<T>(value, head / heads, head % heads), mask(head),
              states[i], tile, rule, mean, bounds(tokens, part), bounds(tokens, part + 1));
  });
  for (int64_t head = 0; head < all; ++head) {
    State& state = states[head * parts];
    for (int64_t part = 1; part < parts; ++part) merge(state, states[head * parts + part]);
    for (float& x : state.S) x /= std::max(state.n, std::numeric_limits<float>::min());
  }
  for_all([&](int64_t i, int64_t head, int64_t part, Scratch& tile) {
    const State& state = states[head * parts];
    read_queries(head_of<T>(query, head / heads, head % heads), head_of<T>(out, head / heads, head % heads), state,
                 tile, rule, bounds(queries, part), bounds(queries, part + 1));
  });
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                  const std::optional<at::Tensor>& visible, int64_t query_map, int64_t key_map, int64_t normalizer,
                  bool query_mean, double eps) {
  const int64_t heads = query.size(1), queries = query.size(2), width = value.size(3);
  const bool inside = query.stride(1) < query.stride(2);  // heads inside tokens, as the queries lie
  const std::vector<int64_t> strides = {heads * queries * width, inside ? width : queries * width,
                                        inside ? heads * width : width, 1};
  at::Tensor out = at::empty_strided({query.size(0), heads, queries, width}, strides, query.options());
  const Table table{cos ? cos->const_data_ptr<float>() : nullptr, sin ? sin->const_data_ptr<float>() : nullptr};
  const Rule rule{static_cast<Map>(query_map), static_cast<Map>(key_map), static_cast<Normalizer>(normalizer),
                  query_mean, static_cast<float>(eps), table, padded(query.size(3)), padded(width)};
  const bool* shown = visible ? visible->const_data_ptr<bool>() : nullptr;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, query.scalar_type(), "attend", [&] {
    attend_typed<scalar_t>(query, key, value, shown, rule, out);
  });
  return out;
}

}  // namespace

TORCH_LIBRARY(linvit_cpu, library) {
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor? visible, int query_map, "
      "int key_map, int normalizer, bool query_mean, float eps) -> Tensor");
}

TORCH_LIBRARY_IMPL(linvit_cpu, CPU, library) { library.impl("attend", attend); }
