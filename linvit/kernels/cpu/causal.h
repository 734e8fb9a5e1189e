// Equal weights; each token sees its block and the blocks before it, and causal attention has blocks of one token.
//
// One task for each head carries the state of what has been read from tile to tile. Small blocks share a tile, in which
// scores are a matrix; a large block is summed first and then read. The formulas are those of linvit/kernels/causal.py
// with an origin that moves: the mean value of all tokens before the tile.
#pragma once

#include <ATen/Parallel.h>

#include "attention.h"

namespace {

constexpr int CHUNK = 16;  // tokens; more cost more products inside a chunk, fewer more traffic of the state

// What one query passes on to the gradients of the keys and values that it sees.
struct Row {
  float gamma, omega, by_num, by_den;
};

// What one query reads, with one over the number of its tokens.
struct Reading {
  float share, num, gain, level;
};

// Tiles of one thread, and the sums of what one query sees, with u relative to the origin.
struct Work {
  Scratch keys, queries;
  State state;
  std::vector<float> r, z, u, origin, centred, weighed, turned, scores;
  std::vector<int64_t> kept;  // how many keys are visible among the first tokens of a tile
  float n = 0;

  Work(int64_t width, int64_t value_width)
      : keys(width, value_width),
        queries(width, value_width),
        state(width, value_width),
        r(width),
        z(width),
        u(value_width),
        origin(value_width),
        centred(TILE * value_width),
        weighed(TILE * width),
        turned(CHUNK * std::max(width, value_width)),
        scores(CHUNK * CHUNK),
        kept(TILE + 1) {}
};

class Causal : Attention {
 public:
  using Attention::parameter_gradients;

  template <typename... Arguments>
  explicit Causal(int64_t block, const Arguments&... arguments)
      : Attention(arguments...), block(block), small(block <= CHUNK), group(small ? CHUNK / block * block : block) {}

  void forward(const at::Tensor& out) {
    for_all([&](int64_t head, Work& work) {
      const Head target = of(out, head);
      const Formula<Normalizer> normalizer = of(rule.normalizer, head);
      float* products = work.queries.product.data();
      read_forwards(head, work, false, [&](int64_t first, int64_t count) {
        clear(work.queries.product, count * value_width);
        multiply(rotated(work.queries), width, 1, work.state.S.data(), value_width, products, count, width);
        if (small) {
          score(rotated(work.queries), count, rotated(work.keys), work.kept[count], width, work);
          hide(count, false, work);
          multiply(work.scores.data(), CHUNK, 1, work.centred.data(), value_width, products, count, work.kept[count]);
        }
        for (int64_t t = 0, summed = 0; t < count; ++t) {
          if (small) summed = add_keys(summed, work.kept[seen(t, count)], work);
          float* row = products + t * value_width;
          const auto [share, num, gain, level] = reading(t, normalizer, work);
          const float by_row = gain * share, by_mean = (level - gain * num) * share;
          for (int64_t c = 0; c < value_width; ++c)
            row[c] = by_row * row[c] + by_mean * work.u[c] + level * work.origin[c];
          if (work.n == 0) std::fill(row, row + value_width, 0.0f);
          write_token(target, first + t, row);
        }
      });
    });
  }

  void backward(const at::Tensor& grad, const at::Tensor& grad_query, const at::Tensor& grad_key,
                const at::Tensor& grad_value) {
    sums.assign(all, ParameterSums(rule));
    for_all([&](int64_t head, Work& work) {
      const auto [begin, end] = span(head, tokens);
      std::vector<Row> rows(end - begin);
      std::vector<float> origins;
      query_backward(head, of(grad, head), of(grad_query, head), rows.data() - begin, origins, work);
      key_backward(head, of(grad, head), of(grad_key, head), of(grad_value, head), rows.data() - begin, origins, work);
    });
  }

 private:
  const int64_t block;
  const bool small;
  const int64_t group;

  static void clear(std::vector<float>& x, int64_t count) { std::fill(x.begin(), x.begin() + count, 0.0f); }
  const float* r_of(const Work& work) const { return rotates ? work.r.data() : work.z.data(); }

  // How many of the first tokens of a chunk the one at place t sees; the first one that sees it.
  int64_t seen(int64_t t, int64_t count) const { return std::min(count, (t / block + 1) * block); }
  int64_t seen_from(int64_t t) const { return t / block * block; }

  template <typename Task>
  void for_all(Task&& task) {
    at::parallel_for(0, all, 1, [&](int64_t begin, int64_t end) {
      Work work(width, value_width);
      for (int64_t head = begin; head < end; ++head) task(head, work);
    });
  }

  // Calls read(first, count) for the tiles of a head; before those of a large block, sum(first, count) for the same.
  template <typename Sum, typename Read>
  void for_tiles(int64_t head, bool backwards, Sum&& sum, Read&& read) {
    const auto [begin, end] = span(head, tokens);
    const int64_t groups = (end - begin + group - 1) / group, size = small ? group : TILE;
    for (int64_t i = 0; i < groups; ++i) {
      const int64_t first = begin + (backwards ? groups - 1 - i : i) * group, last = std::min(end, first + group);
      for (int64_t tile = first; tile < last && !small; tile += size) sum(tile, std::min(size, last - tile));
      for (int64_t tile = first; tile < last; tile += size) read(tile, std::min(size, last - tile));
    }
  }

  // Reads a head in order. Calls rows(first, count) with the queries of a tile, the state of what is before it (or, of a
  // large block, with it) and, of small blocks, its keys and centred values.
  template <typename Rows>
  void read_forwards(int64_t head, Work& work, bool transposes, Rows&& rows) {
    work.state = State(width, value_width);
    State& state = work.state;
    const auto sum = [&](int64_t first, int64_t count) {
      read_keys(head, first, count, work);
      if (work.kept[count] > 0) absorb(state, work.keys, work.kept[count], nullptr, rotates, transposes);
    };
    for_tiles(head, false, sum, [&](int64_t first, int64_t count) {
      read_queries(head, first, count, work);
      if (small) read_keys(head, first, count, work);
      work.n = state.n;
      for (int64_t c = 0; c < width; ++c) work.r[c] = state.n * state.r[c], work.z[c] = state.n * state.z[c];
      std::fill(work.u.begin(), work.u.end(), 0.0f);
      work.origin = state.u;
      if (small && state.n == 0 && work.kept[count] > 0)
        std::copy_n(work.keys.values.data(), value_width, work.origin.data());
      if (small) centre(work.kept[count], work.origin, work);
      rows(first, count);
      if (small && work.kept[count] > 0)
        absorb(state, work.keys, work.kept[count], nullptr, rotates, transposes);
    });
  }

  // κ(k), Rκ(k) and values of the visible tokens.
  void read_keys(int64_t head, int64_t first, int64_t count, Work& work) {
    const Head keys = of(key, head), values = of(value, head);
    const Formula<Map> map = of(rule.key_map, head);
    const bool* shown = mask(head);
    int64_t place = 0;
    for (int64_t t = 0; t < count; work.kept[++t] = place) {
      if (shown != nullptr && !shown[first + t]) continue;
      read(keys, first + t, first + t + AHEAD, map, work.keys, place);
      read_token(values, first + t, first + t + AHEAD, &work.keys.values[place * value_width], value_width);
      work.keys.places[place++] = t;
    }
    work.kept[0] = 0;
  }

  void read_queries(int64_t head, int64_t first, int64_t count, Work& work) {
    const Head source = of(query, head);
    const Formula<Map> map = of(rule.query_map, head);
    for (int64_t t = 0; t < count; ++t) read(source, first + t, first + t + AHEAD, map, work.queries, t);
  }

  void read_gradients(const Head& given, int64_t first, int64_t count, Work& work) {
    for (int64_t t = 0; t < count; ++t)
      read_token(given, first + t, first + t + AHEAD, &work.queries.values[t * value_width], value_width);
  }

  // Values relative to the origin.
  void centre(int64_t count, const std::vector<float>& origin, Work& work) const {
    for (int64_t t = 0; t < count; ++t)
      for (int64_t c = 0; c < value_width; ++c)
        work.centred[t * value_width + c] = work.keys.values[t * value_width + c] - origin[c];
  }

  // Adds the keys at these places to what a query sees; returns the place after them.
  int64_t add_keys(int64_t place, int64_t end, Work& work) const {
    for (; place < end; ++place) {
      add_scaled(work.z.data(), 1, &work.keys.features[place * width], width);
      if (rotates) add_scaled(work.r.data(), 1, &work.keys.rotated[place * width], width);
      add_scaled(work.u.data(), 1, &work.centred[place * value_width], value_width);
      work.n += 1;
    }
    return place;
  }

  // That of a query, whose numbers are then in the first places.
  Reading reading(int64_t t, const Formula<Normalizer>& normalizer, Work& work) const {
    Readings& x = work.queries.readings;
    const float share = work.n > 0 ? 1 / work.n : 0;
    *x.den = dot(&work.queries.features[t * width], work.z.data(), width) * share;
    *x.num = rotates ? dot(&work.queries.rotated[t * width], work.r.data(), width) * share : *x.den;
    normalize(normalizer, work.n, 1, x);
    return {share, *x.num, *x.gain, *x.level};
  }

  // Dot products of the rows of x with those of y.
  void score(const float* x, int64_t rows, const float* y, int64_t columns, int64_t length, Work& work) const {
    for (int64_t t = 0; t < columns; ++t)
      for (int64_t c = 0; c < length; ++c) work.turned[c * CHUNK + t] = y[t * length + c];
    clear(work.scores, rows * CHUNK);
    multiply(x, length, 1, work.turned.data(), CHUNK, work.scores.data(), rows, length);
  }

  // Of scores of queries and keys those that are seen; with `by_key`, rows are keys.
  void hide(int64_t count, bool by_key, Work& work) const {
    for (int64_t t = 0; t < (by_key ? work.kept[count] : count); ++t) {
      float* row = &work.scores[t * CHUNK];
      if (by_key)
        std::fill(row, row + seen_from(work.keys.places[t]), 0.0f);
      else
        std::fill(row + work.kept[seen(t, count)], row + work.kept[count], 0.0f);
    }
  }

  // Writes the gradients of the queries, and the rows and origins.
  void query_backward(int64_t head, const Head& given, const Head& grad_query, Row* rows, std::vector<float>& origins,
                      Work& work) {
    float* products = work.queries.product.data();
    const int64_t begin = span(head, tokens).first;
    const Head source = of(query, head);
    const Formula<Map> map = of(rule.query_map, head);
    const Formula<Normalizer> normalizer = of(rule.normalizer, head);
    Readings& x = work.queries.readings;
    read_forwards(head, work, true, [&](int64_t first, int64_t count) {
      read_gradients(given, first, count, work);
      if ((first - begin) % group == 0) origins.insert(origins.end(), work.origin.begin(), work.origin.end());
      const float* g = work.queries.values.data();
      clear(work.queries.product, count * width);
      multiply(g, value_width, 1, work.state.S.data(), width, products, count, value_width);
      if (small) {
        score(g, count, work.centred.data(), work.kept[count], value_width, work);
        hide(count, false, work);
        multiply(work.scores.data(), CHUNK, 1, rotated(work.keys), width, products, count, work.kept[count]);
      }
      for (int64_t t = 0, summed = 0; t < count; ++t, g += value_width) {
        if (small) summed = add_keys(summed, work.kept[seen(t, count)], work);
        float *product = products + t * width, *own = work.queries.z.data();
        const auto [share, num, gain, level] = reading(t, normalizer, work);
        const float by_mean = dot(g, work.u.data(), value_width) * share;
        *x.by_gain = dot(rotated(work.queries) + t * width, product, width) * share - num * by_mean;
        *x.by_level = by_mean + dot(g, work.origin.data(), value_width);
        if (work.n > 0) normalize_backward(normalizer, work.n, 1, x, sums[head].normalizer);
        Row& row = rows[first + t] = {gain * share, (level - gain * num) * share, (*x.by_num - gain * by_mean) * share,
                                      *x.by_den * share};
        if (work.n == 0) row = {};
        for (int64_t c = 0; c < width; ++c) {
          product[c] = row.gamma * product[c] + row.by_num * r_of(work)[c];
          own[c] = row.by_den * work.z[c];
        }
        write_gradient(grad_query, source, first + t, product, map, sums[head].query_map, work.queries);
      }
    });
  }

  // Writes the gradients of keys and values, from the last tokens to the first. The sums are relative to the origin of
  // the tile, and Rκ(k) to its mean over all tokens, which adds to omega.
  void key_backward(int64_t head, const Head& given, const Head& grad_key, const Head& grad_value, const Row* rows,
                    const std::vector<float>& origins, Work& work) {
    std::vector<float> fresh(width * value_width), move(value_width), products(width);
    Sum S(width * value_width), T(width * value_width), r(width), z(width), u(value_width);
    const int64_t begin = span(head, tokens).first;
    const Head source = of(key, head);
    const Formula<Map> map = of(rule.key_map, head);
    float *by_keys = work.keys.product.data(), *by_values = work.queries.product.data();
    const float *g = work.queries.values.data(), *weighed = work.weighed.data();
    const auto move_origin = [&](const float* origin) {
      for (int64_t c = 0; c < value_width; ++c) move[c] = origin[c] - work.origin[c];
      for (int64_t c = 0; c < width; ++c) products[c] = dot(&S[c * value_width], move.data(), value_width);
      r.add(1, products.data());
      std::copy_n(origin, value_width, work.origin.data());
    };
    const auto read_rows = [&](int64_t first, int64_t count) {
      move_origin(&origins[(first - begin) / group * value_width]);
      read_queries(head, first, count, work);
      read_gradients(given, first, count, work);
      for (int64_t t = 0; t < count; ++t)
        for (int64_t c = 0; c < width; ++c)
          work.weighed[t * width + c] = rows[first + t].gamma * rotated(work.queries)[t * width + c];
    };
    const auto add_rows = [&](int64_t first, int64_t from, int64_t to) {
      for (int64_t t = to - 1; t >= from; --t) {
        r.add(rows[first + t].by_num, rotated(work.queries) + t * width);
        z.add(rows[first + t].by_den, &work.queries.features[t * width]);
        const float omega = rows[first + t].omega + dot(weighed + t * width, work.state.r.data(), width);
        u.add(omega, g + t * value_width);
      }
      return from;
    };
    const auto add_products = [&](int64_t count) {
      clear(fresh, width * value_width);
      multiply(weighed, 1, width, g, value_width, fresh.data(), width, count);
      S.add(1, fresh.data());
      clear(fresh, width * value_width);
      multiply(g, 1, value_width, weighed, width, fresh.data(), value_width, count);
      T.add(1, fresh.data());
    };
    const auto sum = [&](int64_t first, int64_t count) {
      read_rows(first, count);
      add_rows(first, 0, count);
      add_products(count);
    };
    for_tiles(head, true, sum, [&](int64_t first, int64_t count) {
      if (small) read_rows(first, count);
      read_keys(head, first, count, work);
      const int64_t kept = work.kept[count];
      centre(kept, work.origin, work);
      float* keys = work.keys.rotated.data();
      for (int64_t t = 0; t < kept; ++t)
        for (int64_t c = 0; c < width; ++c)
          keys[t * width + c] = rotated(work.keys)[t * width + c] - work.state.r[c];
      clear(work.keys.product, kept * width);
      clear(work.queries.product, kept * value_width);
      multiply(keys, width, 1, S.data(), value_width, by_values, kept, width);
      multiply(work.centred.data(), value_width, 1, T.data(), width, by_keys, kept, value_width);
      if (small) {
        score(keys, kept, weighed, count, width, work);
        hide(count, true, work);
        multiply(work.scores.data(), CHUNK, 1, g, value_width, by_values, kept, count);
        score(work.centred.data(), kept, g, count, value_width, work);
        hide(count, true, work);
        multiply(work.scores.data(), CHUNK, 1, weighed, width, by_keys, kept, count);
      }
      int64_t unseen = count;
      for (int64_t place = kept - 1; place >= 0; --place) {
        const int64_t t = work.keys.places[place];
        if (small) unseen = add_rows(first, seen_from(t), unseen);
        float *by_key = by_keys + place * width, *by_value = by_values + place * value_width, *own = work.keys.z.data();
        add_scaled(by_key, 1, r.data(), width);
        add_scaled(by_value, 1, u.data(), value_width);
        std::copy(z.begin(), z.end(), own);
        write_gradient(grad_key, source, first + t, by_key, map, sums[head].key_map, work.keys);
        write_token(grad_value, first + t, by_value);
      }
      if (small) add_rows(first, 0, unseen), add_products(count);
    });
  }
};

}  // namespace
