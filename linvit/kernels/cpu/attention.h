// What a call of linear attention is, whatever its tokens see.
#pragma once

#include <ATen/Tensor.h>

#include <cmath>
#include <optional>
#include <utility>

#include "state.h"

namespace {

struct Rule {
  Map query_map, key_map;
  Normalizer normalizer;
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

// One call. With bounds, each sequence of a packed batch has heads of its own.
class Attention {
 public:
  Attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const bool* visible,
            const std::optional<at::Tensor>& cu_seqlens, const Rule& rule)
      : query(query),
        key(key),
        value(value),
        visible(visible),
        bounds(cu_seqlens ? cu_seqlens->const_data_ptr<int64_t>() : nullptr),
        rule(rule),
        heads(query.size(1)),
        all((cu_seqlens ? cu_seqlens->size(0) - 1 : query.size(0)) * heads),
        queries(query.size(2)),
        tokens(key.size(2)),
        width(padded(query.size(3))),
        value_width(padded(value.size(3))),
        scale(1 / std::sqrt(static_cast<float>(query.size(3)))),
        rotates(rule.table.cos != nullptr) {}

 protected:
  const at::Tensor &query, &key, &value;
  const bool* visible;
  const int64_t* bounds;
  const Rule& rule;
  const int64_t heads, all, queries, tokens, width, value_width;
  const float scale;
  const bool rotates;

  Head of(const at::Tensor& x, int64_t head) const {
    return head_of(x, bounds == nullptr ? head / heads : 0, head % heads);
  }
  const bool* mask(int64_t head) const {
    return visible == nullptr ? nullptr : visible + (bounds == nullptr ? head : head % heads) * tokens;
  }


  // The first token of a head and the one behind its last; in a batch it has `length` tokens.
  std::pair<int64_t, int64_t> span(int64_t head, int64_t length) const {
    if (bounds == nullptr) return {0, length};
    return {bounds[head / heads], bounds[head / heads + 1]};
  }
  const float* rotated(const Scratch& tile) const { return rotates ? tile.rotated.data() : tile.features.data(); }

  void read(const Head& x, int64_t token, Map map, Scratch& tile, int64_t place) {
    float* features = &tile.features[place * width];
    read_token(x, token, features, width);
    map_token(features, x.width, width, map);
    turn(tile, place, token, x.width);
  }

  void turn(Scratch& tile, int64_t place, int64_t token, int64_t real) {
    if (rotates) rotate(&tile.features[place * width], &tile.rotated[place * width], rule.table, token, real);
  }

  // From the gradients of κ(x), which is added to, and of Rκ(x) to that of x.
  void write_gradient(const Head& out, int64_t token, float* own, const float* by_rotated, const float* features,
                      Map map) {
    if (rotates)
      rotate_back(by_rotated, own, rule.table, token, out.width);
    else
      add_scaled(own, 1, by_rotated, width);
    times_slope(own, features, width, map);
    write_token(out, token, own);
  }
};

}  // namespace
