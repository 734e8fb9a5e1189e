// Bidirectional linear attention: tiles of tokens are read once, mapped, rotated, weighed and multiplied while they lie
// in a core's first cache; nothing of the inputs' size is written but the results.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <memory>

#include "attention.h"
#include "mixing.h"

namespace {

constexpr int64_t MERGED = 12;  // tiles of keys whose state is merged into that of those before

// Sums of κ(q) over visible queries, then their mean times 1/√width; how many they are.
struct QueryMean {
  std::vector<float> mean;
  float count = 0;
};

// Every query reads all tokens. Heads are shared out among threads, and tokens where there are fewer heads than threads.
class Bidirectional : Attention {
 public:
  using Attention::parameter_gradients;
  at::Tensor grad_mixing;  // (heads, blocks, blocks), after a backward pass

  template <typename... Arguments>
  explicit Bidirectional(const Arguments&... arguments)
      : Attention(arguments...), parts(std::clamp<int64_t>(at::get_num_threads() / all, 1, tokens / TILE + 1)) {}

  void forward(const at::Tensor& out) {
    summarize();
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const State& state = states[head];
      const Head target = of(out, head);
      const Formula<Normalizer> normalizer = of(rule.normalizer, head);
      const Readings& x = tile.readings;
      for_queries(head, part, tile, [&](int64_t first, int64_t count) {
        std::fill(tile.product.begin(), tile.product.begin() + count * value_width, 0.0f);
        multiply(rotated(tile), width, 1, state.S.data(), value_width, tile.product.data(), count, width);
        weigh(state, normalizer, count, tile);
        for (int64_t t = 0; t < count; ++t) {
          float* product = &tile.product[t * value_width];
          for (int64_t c = 0; c < value_width; ++c) product[c] = x.gain[t] * product[c] + x.level[t] * state.u[c];
          write_token(target, token_of(first + t), product);
        }
      });
    });
  }

  void backward(const at::Tensor& grad, const at::Tensor& grad_query, const at::Tensor& grad_key,
                const at::Tensor& grad_value) {
    summarize();
    std::vector<Gradient> gradients(all * parts, Gradient(width, value_width));
    sums.assign(all * parts, ParameterSums(rule));
    // With query-mean weights a query's gradient waits for that of the mean, which the keys give.
    read_backward(grad, rule.query_mean ? nullptr : &grad_query, gradients);
    reduce(gradients);
    if (!mixtures.empty()) unmix(gradients);
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
  std::vector<State> states, own;  // what heads read; with blocks also what each of them has summarized
  std::vector<std::optional<Mixture>> mixtures;
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
    const Formula<Map> map = of(rule.query_map, head);
    const int64_t end = start(head, part + 1, queries);
    for (int64_t first = start(head, part, queries); first < end; first += TILE) {
      const int64_t count = std::min<int64_t>(TILE, end - first);
      if (mapped) std::copy_n(mapped_in(head, part), count * width, tile.features.data());
      for (int64_t t = 0; t < count; ++t)
        if (mapped)
          turn(tile, t, token_of(first + t), source.width);
        else
          read(source, token_of(first + t), soon(first + t), map, tile, t);
      work(first, count);
    }
  }

  // The same for visible keys, with their values; their numbers are in tile.places.
  template <typename Work>
  void for_keys(int64_t head, int64_t part, Scratch& tile, Work&& work) {
    const Head keys = of(key, head), values = of(value, head);
    const Formula<Map> map = of(rule.key_map, head);
    const bool* shown = mask(head);
    int64_t count = 0;
    const int64_t end = start(head, part + 1, tokens);
    for (int64_t place = start(head, part, tokens); place < end; ++place) {
      const int64_t token = token_of(place);
      if (shown != nullptr && !shown[token]) continue;
      read(keys, token, soon(place), map, tile, count);
      read_token(values, token, soon(place), &tile.values[count * value_width], value_width);
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
      State& whole = partial[head * parts + part];
      std::optional<State> latest;  // of some tiles: a sum over all of them one by one would round as often
      int64_t tiles = 0;
      for_keys(head, part, tile, [&](int64_t count) {
        if (tiles > 0 && tiles % MERGED == 0) {
          if (latest) merge(whole, *latest);
          latest.emplace(width, value_width);
        }
        absorb(latest ? *latest : whole, tile, count, mean, rotates);
        ++tiles;
      });
      if (latest) merge(whole, *latest);
    });
    states.clear();
    for (int64_t head = 0; head < all; ++head) {
      State& state = partial[head * parts];
      for (int64_t part = 1; part < parts; ++part) merge(state, partial[head * parts + part]);
      const float share = 1 / std::max(state.n, std::numeric_limits<float>::min());
      for (float& x : state.S) x *= share;
      states.push_back(std::move(state));
    }
    if (blocks.mixing != nullptr) mix();
  }

  // The index of a block of head `head` among all heads of an image or of all images.
  int64_t block_of(int64_t head, int64_t block) const {
    return (head / heads * blocks.count + block) * heads + head % heads;
  }

  // Replaces the states of blocks by what each block reads of all of them.
  void mix() {
    const int64_t number = all / blocks.count;
    own = std::move(states);
    states.assign(all, State(0, 0));
    mixtures.resize(number);
    at::parallel_for(0, number, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        const float* mixing = blocks.mixing + head % heads * blocks.count * blocks.count;
        const auto state = [&](int64_t block) -> const State& { return own[block_of(head, block)]; };
        mixtures[head].emplace(mixing, blocks.count, state);
        for (int64_t block = 0; block < blocks.count; ++block)
          states[block_of(head, block)] = mixtures[head]->of(block);
      }
    });
  }

  // Replaces the gradients of what blocks read by those of their own states, which are current again.
  void unmix(std::vector<Gradient>& gradients) {
    const int64_t number = all / blocks.count, square = blocks.count * blocks.count;
    grad_mixing = at::zeros({query.size(0), heads, blocks.count, blocks.count}, at::kFloat);
    float* grads = grad_mixing.data_ptr<float>();
    at::parallel_for(0, number, 1, [&](int64_t begin, int64_t end) {
      for (int64_t head = begin; head < end; ++head) {
        const auto gradient = [&](int64_t block) -> Gradient& { return gradients[block_of(head, block) * parts]; };
        mixtures[head]->backward(gradient, grads + head * square);
      }
    });
    grad_mixing = grad_mixing.sum(0);
    states = std::move(own);
  }

  float* mapped_in(int64_t head, int64_t part) const { return &mapped[(head * parts + part) * TILE * width]; }

  void find_means() {
    std::vector<QueryMean> partial(all * parts);
    if (visible == nullptr && bounds == nullptr && queries <= TILE * parts)
      mapped = std::make_unique_for_overwrite<float[]>(all * parts * TILE * width);
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const Head source = of(query, head);
      const Formula<Map> map = of(rule.query_map, head);
      const bool* shown = mask(head);
      QueryMean& sum = partial[head * parts + part];
      sum.mean.resize(width);
      const int64_t end = start(head, part + 1, queries);
      for (int64_t token = start(head, part, queries); token < end; ++token) {
        if (shown != nullptr && !shown[token]) continue;
        float* features = mapped ? mapped_in(head, part) + static_cast<int64_t>(sum.count) * width : tile.features.data();
        map_token(source, token, token + AHEAD, map, features);
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

  void weigh(const State& state, const Formula<Normalizer>& normalizer, int64_t count, Scratch& tile) const {
    Readings& x = tile.readings;
    for (int64_t t = 0; t < count; ++t) {
      x.den[t] = dot(&tile.features[t * width], state.z.data(), width);
      x.num[t] = rotates ? dot(&tile.rotated[t * width], state.r.data(), width) : x.den[t];
    }
    if (state.n > 0) normalize(normalizer, state.mass(), count, x);
    if (state.n == 0) std::fill_n(x.gain, count, 0.0f), std::fill_n(x.level, count, 0.0f);
  }

  // Sums the gradients of what the queries read, and writes those of the queries where grad_query is given. With
  // query-mean weights these are two passes.
  void read_backward(const at::Tensor& grad, const at::Tensor* grad_query, std::vector<Gradient>& gradients) {
    for_all([&](int64_t head, int64_t part, Scratch& tile) {
      const State& state = states[head];
      const std::vector<float> turned = transposed(state.S, width, value_width);
      const Head given = of(grad, head), source = of(query, head);
      const Formula<Map> map = of(rule.query_map, head);
      const Formula<Normalizer> normalizer = of(rule.normalizer, head);
      Gradient& whole = gradients[head * parts + part];
      ParameterSums& parameters = sums[head * parts + part];
      Readings& x = tile.readings;
      const bool adds = grad_query == nullptr || !rule.query_mean;
      std::vector<float> of_tile(width * value_width);
      ParameterSum again(rule.normalizer.count);
      for_queries(head, part, tile, [&](int64_t first, int64_t count) {
        for (int64_t t = 0; t < count; ++t)
          read_token(given, token_of(first + t), soon(first + t), &tile.values[t * value_width], value_width);
        std::fill(tile.product.begin(), tile.product.begin() + count * width, 0.0f);
        multiply(tile.values.data(), value_width, 1, turned.data(), width, tile.product.data(), count, value_width);
        for (int64_t t = 0; t < count; ++t) {
          x.by_gain[t] = dot(&tile.product[t * width], rotated(tile) + t * width, width);
          x.by_level[t] = dot(&tile.values[t * value_width], state.u.data(), value_width);
        }
        weigh(state, normalizer, count, tile);
        if (state.n > 0) normalize_backward(normalizer, state.mass(), count, x, adds ? parameters.normalizer : again);
        if (state.n == 0) std::fill_n(x.by_num, count, 0.0f), std::fill_n(x.by_den, count, 0.0f);
        for (int64_t t = 0; t < count; ++t) {
          float *product = &tile.product[t * width], *g = &tile.values[t * value_width], *own = tile.z.data();
          if (adds) {
            whole.u.add(x.level[t], g);
            whole.r.add(x.by_num[t], rotated(tile) + t * width);
            whole.z.add(x.by_den[t], &tile.features[t * width]);
            for (int64_t c = 0; c < value_width; ++c) g[c] *= x.gain[t];
          }
          if (grad_query == nullptr) continue;
          for (int64_t c = 0; c < width; ++c) product[c] = x.gain[t] * product[c] + x.by_num[t] * state.r[c];
          for (int64_t c = 0; c < width; ++c) own[c] = x.by_den[t] * state.z[c];
          if (rule.query_mean && (mask(head) == nullptr || mask(head)[token_of(first + t)]))
            add_scaled(own, scale / means[head].count, gradients[head * parts].mean.data(), width);
          write_gradient(of(*grad_query, head), source, token_of(first + t), product, map, parameters.query_map, tile);
        }
        if (!adds) return;
        std::fill(of_tile.begin(), of_tile.end(), 0.0f);
        multiply(rotated(tile), 1, width, tile.values.data(), value_width, of_tile.data(), width, count);
        whole.S.add(1, of_tile.data());
      });
    });
  }

  void summarize_backward(int64_t head, int64_t part, Scratch& tile, std::vector<Gradient>& gradients,
                          const Head& grad_key, const Head& grad_value) {
    const State& state = states[head];
    const Head source = of(key, head);
    const Formula<Map> map = of(rule.key_map, head);
    const Gradient& whole = gradients[head * parts];
    const std::vector<float> turned = transposed(whole.S, width, value_width);
    std::vector<float> level = whole.u, centred_keys(TILE * width), product(TILE * value_width), mean(width);
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
          alpha *= std::exp(dot(features, means[head].mean.data(), width) - state.shift);
          const float by_alpha = dot(rotated(tile) + t * width, by_rotated, width) +
                                 dot(rotated(tile) + t * width, whole.r.data(), width) +
                                 dot(features, whole.z.data(), width) + dot(level.data(), centred, value_width) +
                                 dot(level.data(), state.u.data(), value_width);
          by_exponent = alpha * (by_alpha - centre);
          add_scaled(mean.data(), by_exponent, features, width);
        }
        for (int64_t c = 0; c < width; ++c) own[c] = alpha * whole.z[c];
        if (rule.query_mean) add_scaled(own, by_exponent, means[head].mean.data(), width);
        for (int64_t c = 0; c < width; ++c) by_rotated[c] = alpha * (by_rotated[c] + whole.r[c]);
        for (int64_t c = 0; c < value_width; ++c) by_value[c] = alpha * (by_value[c] + whole.u[c]);
        write_gradient(grad_key, source, tile.places[t], by_rotated, map, sums[head * parts + part].key_map, tile);
        write_token(grad_value, tile.places[t], by_value);
      }
    });
    gradients[head * parts + part].mean = mean;
  }

  void reduce(std::vector<Gradient>& gradients) {
    for (int64_t head = 0; head < all; ++head)
      for (int64_t part = 1; part < parts; ++part) gradients[head * parts].add(gradients[head * parts + part]);
  }
};

}  // namespace
