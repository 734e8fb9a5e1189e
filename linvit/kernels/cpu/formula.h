// What the kernel asks of a feature map and of a normalizer. Those of users are compiled with this file alone: a table
// of functions with a C name, whose address the operator gets.
//
// `parameters` are numbers of a head in an order of the formula's own, null if it has none. `sums` has room for as many;
// `backward` adds the gradient of the parameters to it.
#pragma once

#include <cstdint>

namespace linvit {

// Of one token: the channels of a head.
struct Map {
  // y may be x.
  void (*forward)(const float* x, float* y, int64_t width, const float* parameters);
  // dx may be dy.
  void (*backward)(const float* x, const float* dy, float* dx, int64_t width, const float* parameters, float* sums);
};

// Of `count` queries that see as many tokens.
struct Normalizer {
  void (*forward)(const float* num, const float* den, float mass, float scale, float eps, float* gain, float* level,
                  int64_t count, const float* parameters);
  void (*backward)(const float* dgain, const float* dlevel, const float* num, const float* den, float mass, float scale,
                   float eps, float* dnum, float* dden, int64_t count, const float* parameters, float* sums);
};

}  // namespace linvit
