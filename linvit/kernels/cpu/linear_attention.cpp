// Bidirectional linear attention on a CPU, forward and backward. Tiles of tokens are read once, mapped, rotated,
// weighed and multiplied while they lie in a core's first cache; nothing of the inputs' size is written but the results.
#include <ATen/Parallel.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <tuple>

#include "causal.h"

namespace {

// Sums of κ(q) over visible queries, then their mean times 1/√width; how many they are.
struct QueryMean {
  std::vector<float> mean;
  float count = 0;
};

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

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t columns) {
  std::vector<float> out(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = x[i * columns + j];
  return out;
}

// Every query reads all tokens. Heads are shared out among threads, and tokens where there are fewer heads than threads.
class Bidirectional : Attention {
 public:
  template <typename... Arguments>
  explicit Bidirectional(const Arguments&... arguments)
      : Attention(arguments...), parts(std::clamp<int64_t>(at::get_num_threads() / all, 1, tokens / TILE + 1)) {}

  void forward(const at::Tensor& out) {
    summarize();
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const State& state = states[head];
      const Head target = of(out, head);
      for_queries(head, part, tile, [&](int64_t first, int64_t count) {
        std::fill(tile.product.begin(), tile.product.begin() + count * value_width, 0.0f);
        multiply(rotated(tile), width, 1, state.S.data(), value_width, tile.product.data(), count, width);
        for (int64_t t = 0; t < count; ++t) {
          const Setting set = setting(state, tile, t);
          float* product = &tile.product[t * value_width];
          for (int64_t c = 0; c < value_width; ++c) product[c] = set.gain * product[c] + set.level * state.u[c];
          write_token(target, first + t, product);
        }
      });
    });
  }

  void backward(const at::Tensor& grad, const at::Tensor& grad_query, const at::Tensor& grad_key,
                const at::Tensor& grad_value) {
    summarize();
    std::vector<Gradient> gradients(all * parts, Gradient(width, value_width));
    // With query-mean weights a query's gradient waits for that of the mean, which the keys give.
    read_backward(grad, rule.query_mean ? nullptr : &grad_query, gradients);
    reduce(gradients);
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      summarize_backward(head, part, tile, gradients, of(grad_key, head), of(grad_value, head));
    });
    if (!rule.query_mean) return;
    for (int64_t head = 0; head < all; ++head)
      for (int64_t part = 1; part < parts; ++part)
        add_scaled(gradients[head * parts].mean.data(), 1, gradients[head * parts + part].mean.data(), width);
    read_backward(grad, &grad_query, gradients);
  }

 private:
  const int64_t parts;
  std::vector<State> states;
  std::vector<QueryMean> means;
  std::unique_ptr<float[]> mapped;  // κ(q) from their mean on, if no part has more than one tile

  // The first token of a part of a head's tokens; that of the next part ends it.
  int64_t start(int64_t head, int64_t part, int64_t length) const {
    const auto [begin, end] = span(head, length);
    return begin + (end - begin) * part / parts;
  }

  template <typename Work>
  void for_all(Work&& work) {
    at::parallel_for(0, all * parts, 1, [&](int64_t begin, int64_t end) {
      Scratch& tile = scratch(width, value_width);
      for (int64_t i = begin; i < end; ++i) work(i / parts, i % parts, tile);
    });
  }

  // Calls work(first, count) with κ(q) and Rκ(q) of a tile at hand.
  template <typename Work>
  void for_queries(int64_t head, int64_t part, Scratch& tile, Work&& work) {
    const Head source = of(query, head);
    const int64_t end = start(head, part + 1, queries);
    for (int64_t first = start(head, part, queries); first < end; first += TILE) {
      const int64_t count = std::min<int64_t>(TILE, end - first);
      if (mapped) std::copy_n(mapped_in(head, part), count * width, tile.features.data());
      for (int64_t t = 0; t < count; ++t)
        if (mapped)
          turn(tile, t, first + t, source.width);
        else
          read(source, first + t, rule.query_map, tile, t);
      work(first, count);
    }
  }

  // The same for visible keys, with their values; their numbers are in tile.places.
  template <typename Work>
  void for_keys(int64_t head, int64_t part, Scratch& tile, Work&& work) {
    const Head keys = of(key, head), values = of(value, head);
    const bool* shown = mask(head);
    int64_t count = 0;
    const int64_t end = start(head, part + 1, tokens);
    for (int64_t token = start(head, part, tokens); token < end; ++token) {
      if (shown != nullptr && !shown[token]) continue;
      read(keys, token, rule.key_map, tile, count);
      read_token(values, token, &tile.values[count * value_width], value_width);
      tile.places[count] = token;
      if (++count == TILE) {
        work(count);
        count = 0;
      }
    }
    if (count > 0) work(count);
  }

  void summarize() {
    if (rule.query_mean) find_means();
    std::vector<State> partial;  // each made where it stays, because copies are large
    partial.reserve(all * parts);
    for (int64_t i = 0; i < all * parts; ++i) partial.emplace_back(width, value_width);
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const float* mean = rule.query_mean ? means[head].mean.data() : nullptr;
      for_keys(head, part, tile,
               [&](int64_t count) { absorb(partial[head * parts + part], tile, count, mean, rotates); });
    });
    states.clear();
    for (int64_t head = 0; head < all; ++head) {
      State& state = partial[head * parts];
      for (int64_t part = 1; part < parts; ++part) merge(state, partial[head * parts + part]);
      const float share = 1 / std::max(state.n, std::numeric_limits<float>::min());
      for (float& x : state.S) x *= share;
      states.push_back(std::move(state));
    }
  }

  float* mapped_in(int64_t head, int64_t part) const { return &mapped[(head * parts + part) * TILE * width]; }

  void find_means() {
    std::vector<QueryMean> partial(all * parts);
    if (visible == nullptr && bounds == nullptr && queries <= TILE * parts)
      mapped = std::make_unique_for_overwrite<float[]>(all * parts * TILE * width);
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const Head source = of(query, head);
      const bool* shown = mask(head);
      QueryMean& sum = partial[head * parts + part];
      sum.mean.resize(width);
      const int64_t end = start(head, part + 1, queries);
      for (int64_t token = start(head, part, queries); token < end; ++token) {
        if (shown != nullptr && !shown[token]) continue;
        float* features = mapped ? mapped_in(head, part) + static_cast<int64_t>(sum.count) * width : tile.features.data();
        read_token(source, token, features, width);
        map_token(features, source.width, width, rule.query_map);
        add_scaled(sum.mean.data(), 1, features, width);
        sum.count += 1;
      }
    });
    means.clear();
    for (int64_t head = 0; head < all; ++head) {
      QueryMean& sum = partial[head * parts];
      for (int64_t part = 1; part < parts; ++part) {
        add_scaled(sum.mean.data(), 1, partial[head * parts + part].mean.data(), width);
        sum.count += partial[head * parts + part].count;
      }
      for (float& x : sum.mean) x *= scale / std::max(sum.count, 1.0f);
      means.push_back(std::move(sum));
    }
  }

  Setting setting(const State& state, const Scratch& tile, int64_t t) const {
    const float num = dot(rotated(tile) + t * width, state.r.data(), width);
    const float den = dot(&tile.features[t * width], state.z.data(), width);
    return normalized(rule.normalizer, num, den, state.mass(), scale, rule.eps);
  }

  // Sums the gradients of what the queries read, and writes those of the queries where grad_query is given. With
  // query-mean weights these are two passes.
  void read_backward(const at::Tensor& grad, const at::Tensor* grad_query, std::vector<Gradient>& gradients) {
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const State& state = states[head];
      const std::vector<float> turned = transposed(state.S, width, value_width);
      const Head given = of(grad, head);
      Gradient& sums = gradients[head * parts + part];
      const bool adds = grad_query == nullptr || !rule.query_mean;
      std::vector<float> of_tile(width * value_width);
      for_queries(head, part, tile, [&](int64_t first, int64_t count) {
        for (int64_t t = 0; t < count; ++t) read_token(given, first + t, &tile.values[t * value_width], value_width);
        std::fill(tile.product.begin(), tile.product.begin() + count * width, 0.0f);
        multiply(tile.values.data(), value_width, 1, turned.data(), width, tile.product.data(), count, value_width);
        for (int64_t t = 0; t < count; ++t) {
          float *product = &tile.product[t * width], *g = &tile.values[t * value_width];
          const float *features = &tile.features[t * width], *turned_features = rotated(tile) + t * width;
          const Setting set = setting(state, tile, t);
          const float by_gain = dot(product, turned_features, width), by_level = dot(g, state.u.data(), value_width);
          const float by_num = by_level * set.level_by_num;
          const float by_den = by_gain * set.gain_by_den + by_level * set.level_by_den;
          if (adds) {
            sums.u.add(set.level, g);
            sums.r.add(by_num, turned_features);
            sums.z.add(by_den, features);
            for (int64_t c = 0; c < value_width; ++c) g[c] *= set.gain;
          }
          if (grad_query == nullptr) continue;
          for (int64_t c = 0; c < width; ++c) product[c] = set.gain * product[c] + by_num * state.r[c];
          float* own = tile.z.data();
          for (int64_t c = 0; c < width; ++c) own[c] = by_den * state.z[c];
          if (rule.query_mean && (mask(head) == nullptr || mask(head)[first + t]))
            add_scaled(own, scale / means[head].count, gradients[head * parts].mean.data(), width);
          write_gradient(of(*grad_query, head), first + t, own, product, features, rule.query_map);
        }
        if (!adds) return;
        std::fill(of_tile.begin(), of_tile.end(), 0.0f);
        multiply(rotated(tile), 1, width, tile.values.data(), value_width, of_tile.data(), width, count);
        sums.S.add(1, of_tile.data());
      });
    });
  }

  void summarize_backward(int64_t head, int64_t part, Scratch& tile, std::vector<Gradient>& gradients,
                          const Head& grad_key, const Head& grad_value) {
    const State& state = states[head];
    const Gradient& whole = gradients[head * parts];
    const std::vector<float> turned = transposed(whole.S, width, value_width);
    std::vector<float> level = whole.u, centred_keys(TILE * width), product(TILE * value_width), sums(width);
    for (int64_t i = 0; i < width; ++i) add_scaled(level.data(), -state.r[i], &whole.S[i * value_width], value_width);
    float centre = dot(level.data(), state.u.data(), value_width) + dot(whole.r.data(), state.r.data(), width) +
                   dot(whole.z.data(), state.z.data(), width);
    for (int64_t i = 0; i < width; ++i)
      centre += dot(&state.S[i * value_width], &whole.S[i * value_width], value_width);
    for_keys(head, part, tile, [&](int64_t count) {
      std::fill(tile.product.begin(), tile.product.begin() + count * width, 0.0f);
      std::fill(product.begin(), product.end(), 0.0f);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t c = 0; c < width; ++c) centred_keys[t * width + c] = rotated(tile)[t * width + c] - state.r[c];
      multiply(centred_keys.data(), width, 1, whole.S.data(), value_width, product.data(), count, width);
      for (int64_t t = 0; t < count; ++t) add_scaled(&tile.values[t * value_width], -1, state.u.data(), value_width);
      multiply(tile.values.data(), value_width, 1, turned.data(), width, tile.product.data(), count, value_width);
      for (int64_t t = 0; t < count; ++t) {
        const float *features = &tile.features[t * width], *centred = &tile.values[t * value_width];
        float *by_rotated = &tile.product[t * width], *by_value = &product[t * value_width], *own = tile.z.data();
        float alpha = 1 / state.n, by_exponent = 0;
        if (rule.query_mean) {
          const float* mean = means[head].mean.data();
          alpha *= std::exp(dot(features, mean, width) - state.shift);
          const float by_alpha = dot(rotated(tile) + t * width, by_rotated, width) +
                                 dot(rotated(tile) + t * width, whole.r.data(), width) +
                                 dot(features, whole.z.data(), width) + dot(level.data(), centred, value_width) +
                                 dot(level.data(), state.u.data(), value_width);
          by_exponent = alpha * (by_alpha - centre);
          add_scaled(sums.data(), by_exponent, features, width);
        }
        for (int64_t c = 0; c < width; ++c) own[c] = alpha * whole.z[c];
        if (rule.query_mean) add_scaled(own, by_exponent, means[head].mean.data(), width);
        for (int64_t c = 0; c < width; ++c) by_rotated[c] = alpha * (by_rotated[c] + whole.r[c]);
        for (int64_t c = 0; c < value_width; ++c) by_value[c] = alpha * (by_value[c] + whole.u[c]);
        write_gradient(grad_key, tile.places[t], own, by_rotated, features, rule.key_map);
        write_token(grad_value, tile.places[t], by_value);
      }
    });
    gradients[head * parts + part].mean = sums;
  }

  void reduce(std::vector<Gradient>& gradients) {
    for (int64_t head = 0; head < all; ++head)
      for (int64_t part = 1; part < parts; ++part) gradients[head * parts].add(gradients[head * parts + part]);
  }
};

// Heads inside tokens where they lie so in `like`; channels are innermost.
at::Tensor room(const at::Tensor& like, int64_t width, bool filled) {
  const int64_t heads = like.size(1), tokens = like.size(2);
  const bool inside = like.stride(1) < like.stride(2);
  const std::vector<int64_t> strides = {heads * tokens * width, inside ? width : tokens * width,
                                        inside ? heads * width : width, 1};
  at::Tensor out = at::empty_strided({like.size(0), heads, tokens, width}, strides, like.options());
  return filled ? out.zero_() : out;
}

Rule rule_of(const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, int64_t query_map,
             int64_t key_map, int64_t normalizer, bool query_mean, double eps) {
  const Table table{cos ? cos->const_data_ptr<float>() : nullptr, sin ? sin->const_data_ptr<float>() : nullptr};
  return {static_cast<Map>(query_map), static_cast<Map>(key_map), static_cast<Normalizer>(normalizer), query_mean,
          static_cast<float>(eps), table};
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                  const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
                  const std::optional<at::Tensor>& visible, const std::optional<at::Tensor>& cu_seqlens,
                  int64_t query_map, int64_t key_map, int64_t normalizer, bool query_mean, double eps, int64_t block) {
  at::Tensor out = room(query, value.size(3), false);
  const Rule rule = rule_of(cos, sin, query_map, key_map, normalizer, query_mean, eps);
  const bool* shown = visible ? visible->const_data_ptr<bool>() : nullptr;
  if (block > 0 && block < key.size(2))
    Causal(block, query, key, value, shown, cu_seqlens, rule).forward(out);
  else
    Bidirectional(query, key, value, shown, cu_seqlens, rule).forward(out);
  return out;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin,
    const std::optional<at::Tensor>& visible, const std::optional<at::Tensor>& cu_seqlens, int64_t query_map,
    int64_t key_map, int64_t normalizer, bool query_mean, double eps, int64_t block) {
  const bool masks = visible.has_value();
  at::Tensor grad_query = room(query, query.size(3), false), grad_key = room(key, key.size(3), masks),
             grad_value = room(value, value.size(3), masks);
  const Rule rule = rule_of(cos, sin, query_map, key_map, normalizer, query_mean, eps);
  const bool* shown = masks ? visible->const_data_ptr<bool>() : nullptr;
  if (block > 0 && block < key.size(2))
    Causal(block, query, key, value, shown, cu_seqlens, rule).backward(grad, grad_query, grad_key, grad_value);
  else
    Bidirectional(query, key, value, shown, cu_seqlens, rule).backward(grad, grad_query, grad_key, grad_value);
  return {grad_query, grad_key, grad_value};
}

}  // namespace

TORCH_LIBRARY(linvit_cpu, library) {
  const std::string inputs =
      "Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor? visible, Tensor? cu_seqlens, "
      "int query_map, int key_map, int normalizer, bool query_mean, float eps, int block)";
  library.def(("attend(" + inputs + " -> Tensor").c_str());
  library.def(("attend_backward(Tensor grad, " + inputs + " -> (Tensor, Tensor, Tensor)").c_str());
}

TORCH_LIBRARY_IMPL(linvit_cpu, CPU, library) {
  library.impl("attend", attend);
  library.impl("attend_backward", attend_backward);
}
