// What a call of linear attention is, whatever its tokens see.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <optional>
#include <utility>

#include "formula.h"
#include "state.h"

namespace {

using linvit::Map, linvit::Normalizer;

// The functions of a call, or of a head of it, and their parameters, `count` for each head.
template <typename Functions>
struct Formula {
  const Functions* functions;
  const float* parameters = nullptr;
  int64_t by_batch = 0, by_head = 0, count = 0;
};

struct Rule {
  Formula<Map> query_map, key_map;
  Formula<Normalizer> normalizer;
  bool query_mean;
  float eps;
  Table table;
};

float dot(const float* x, const float* y, int64_t width) {
  Vector sum{};
  for (int64_t c = 0; c < width; c += LANES) sum += load(x + c) * load(y + c);
  return sum_of<LANES>(sum);
}

void add_scaled(float* out, float scale, const float* x, int64_t width) {
  for (int64_t c = 0; c < width; ++c) out[c] += scale * x[c];
}

// The gradient of a head's parameters.
struct ParameterSum : Sum {
  std::vector<float> fresh;

  explicit ParameterSum(int64_t count) : Sum(count), fresh(count) {}

  // Adds what call(sums) adds to zeros.
  template <typename Call>
  void add_from(Call&& call) {
    if (empty()) return call(nullptr);
    std::fill(fresh.begin(), fresh.end(), 0.0f);
    call(fresh.data());
    add(1, fresh.data());
  }
};

struct ParameterSums {
  ParameterSum query_map, key_map, normalizer;

  explicit ParameterSums(const Rule& rule)
      : query_map(rule.query_map.count), key_map(rule.key_map.count), normalizer(rule.normalizer.count) {}
};

// Every image in the same blocks, each with heads of its own: block b has the tokens order[cuts[b]] … before cuts[b + 1].
// mixing (heads, count, count): how much a block weighs the tokens of another.
struct Blocks {
  const int64_t *order = nullptr, *cuts = nullptr;
  const float* mixing = nullptr;
  int64_t count = 1;
};

// One call. With bounds, each sequence of a packed batch has heads of its own.
class Attention {
 public:
  Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const bool* visible,
            const std::optional<at::Tensor>& cu_seqlens, const Rule& rule, const Blocks& blocks = {})
      : query(query),
        key(key),
        value(value),
        visible(visible),
        bounds(cu_seqlens ? cu_seqlens->const_data_ptr<int64_t>() : nullptr),
        rule(rule),
        blocks(blocks),
        heads(query.size(1)),
        all((cu_seqlens ? cu_seqlens->size(0) - 1 : query.size(0) * blocks.count) * heads),
        queries(query.size(2)),
        tokens(key.size(2)),
        width(padded(query.size(3))),
        value_width(padded(value.size(3))),
        scale(1 / std::sqrt(static_cast<float>(query.size(3)))),
        rotates(rule.table.cos != nullptr) {}

  // After a backward pass, of those formulas that have parameters: (batch, heads, parameters).
  std::vector<at::Tensor> parameter_gradients() const {
    std::vector<at::Tensor> gradients;
    for (const auto part : {&ParameterSums::query_map, &ParameterSums::key_map, &ParameterSums::normalizer}) {
      const int64_t count = (sums.front().*part).size(), each = sums.size() / all;
      if (count == 0) continue;
      gradients.push_back(at::zeros({query.size(0), heads, count}, at::kFloat));
      for (size_t i = 0; i < sums.size(); ++i) {
        const int64_t row = batch_of(i / each) * heads + i / each % heads;
        add_scaled(gradients.back().data_ptr<float>() + row * count, 1, (sums[i].*part).data(), count);
      }
    }
    return gradients;
  }

 protected:
  const at::Tensor &query, &key, &value;
  const bool* visible;
  const int64_t* bounds;
  const Rule& rule;
  const Blocks blocks;
  const int64_t heads, all, queries, tokens, width, value_width;
  const float scale;
  const bool rotates;
  std::vector<ParameterSums> sums;  // of each head, or of each part of a head

  int64_t batch_of(int64_t head) const { return bounds == nullptr ? head / heads / blocks.count : 0; }
  int64_t token_of(int64_t place) const { return blocks.order == nullptr ? place : blocks.order[place]; }
  int64_t soon(int64_t place) const {
    return blocks.order == nullptr ? place + AHEAD : blocks.order[std::min(place + AHEAD, tokens - 1)];
  }
  Head of(const at::Tensor& x, int64_t head) const { return head_of(x, batch_of(head), head % heads); }
  template <typename Functions>
  Formula<Functions> of(Formula<Functions> formula, int64_t head) const {
    formula.parameters += batch_of(head) * formula.by_batch + head % heads * formula.by_head;
    return formula;
  }
  const bool* mask(int64_t head) const {
    return visible == nullptr ? nullptr : visible + (batch_of(head) * heads + head % heads) * tokens;
  }

  // The place of the first token of a head and the one behind its last; in a batch it has `length` tokens.
  std::pair<int64_t, int64_t> span(int64_t head, int64_t length) const {
    const int64_t block = head / heads % blocks.count;
    if (blocks.cuts != nullptr) return {blocks.cuts[block], blocks.cuts[block + 1]};
    if (bounds == nullptr) return {0, length};
    return {bounds[head / heads], bounds[head / heads + 1]};
  }
  const float* rotated(const Scratch& tile) const { return rotates ? tile.rotated.data() : tile.features.data(); }

  void read(const Head& x, int64_t token, int64_t soon, const Formula<Map>& map, Scratch& tile, int64_t place) {
    map_token(x, token, soon, map, &tile.features[place * width]);
    turn(tile, place, token, x.width);
  }

  void map_token(const Head& x, int64_t token, int64_t soon, const Formula<Map>& map, float* features) {
    map.functions->forward(token_at(x, token, soon, features, width), features, x.width, map.parameters);
    std::fill(features + x.width, features + width, 0.0f);
  }

  void turn(Scratch& tile, int64_t place, int64_t token, int64_t real) {
    if (rotates) rotate(&tile.features[place * width], &tile.rotated[place * width], rule.table, token, real);
  }

  // Fills gain and level of queries from num and den.
  void normalize(const Formula<Normalizer>& normalizer, float mass, int64_t count, Readings& x) const {
    normalizer.functions->forward(x.num, x.den, mass, scale, rule.eps, x.gain, x.level, count, normalizer.parameters);
  }

  // From the gradients of gain and level to those of num and den.
  void normalize_backward(const Formula<Normalizer>& normalizer, float mass, int64_t count, Readings& x,
                          ParameterSum& parameters) const {
    parameters.add_from([&](float* sums) {
      normalizer.functions->backward(x.by_gain, x.by_level, x.num, x.den, mass, scale, rule.eps, x.by_num, x.by_den,
                                     count, normalizer.parameters, sums);
    });
  }

  // From the gradients of κ(x), in tile.z, and of Rκ(x) to that of x.
  void write_gradient(const Head& out, const Head& x, int64_t token, const float* by_rotated, const Formula<Map>& map,
                      ParameterSum& parameters, Scratch& tile) {
    float* own = tile.z.data();
    if (rotates)
      rotate_back(by_rotated, own, rule.table, token, out.width);
    else
      add_scaled(own, 1, by_rotated, width);
    const float* source = token_at(x, token, token, tile.source.data(), width);
    parameters.add_from([&](float* sums) {
      map.functions->backward(source, own, own, out.width, map.parameters, sums);
    });
    write_token(out, token, own);
  }
};

}  // namespace
