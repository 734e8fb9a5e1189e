// The gradient of a depthwise convolution's weight: stride 1, maps whose channels lie innermost.

#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "tiles.h"

namespace {

// sums[c] += sum over w of grad[w, c] * x[w, c], for V vectors of channels.
template <int lanes, int V>
void add_vectors(const float* grad, int64_t grad_step, const float* x, int64_t x_step, int64_t count, double* sums) {
  typedef float Some __attribute__((vector_size(lanes * sizeof(float))));
  Some products[V] = {}, one, other;
  for (int64_t w = 0; w < count; ++w)
    for (int v = 0; v < V; ++v) {
      std::memcpy(&one, grad + w * grad_step + v * lanes, sizeof one);
      std::memcpy(&other, x + w * x_step + v * lanes, sizeof other);
      products[v] += one * other;
    }
  for (int v = 0; v < V; ++v)
    for (int lane = 0; lane < lanes; ++lane) sums[v * lanes + lane] += products[v][lane];
}

void add_products(const float* grad, int64_t grad_step, const float* x, int64_t x_step, int64_t count, double* sums,
                  int64_t channels) {
  if (channels == PANEL * LANES) return add_vectors<LANES, PANEL>(grad, grad_step, x, x_step, count, sums);
  int64_t c = 0;
  for (; c + LANES <= channels; c += LANES)
    add_vectors<LANES, 1>(grad + c, grad_step, x + c, x_step, count, sums + c);
  for (; c + 4 <= channels; c += 4) add_vectors<4, 1>(grad + c, grad_step, x + c, x_step, count, sums + c);
  for (; c < channels; ++c) add_vectors<1, 1>(grad + c, grad_step, x + c, x_step, count, sums + c);
}

// grad and x are (batch, channels, height, width) of one size, zeros around x; the result is (channels, 1, *kernel).
at::Tensor depthwise_weight_gradient(const at::Tensor& grad, const at::Tensor& x, at::IntArrayRef kernel,
                                     at::IntArrayRef padding) {
  const int64_t batch = x.size(0), channels = x.size(1), height = x.size(2), width = x.size(3);
  const int64_t block = PANEL * LANES, blocks = (channels + block - 1) / block;
  at::Tensor out = at::empty({channels, 1, kernel[0], kernel[1]}, grad.options());
  float* result = out.data_ptr<float>();
  const float *grads = grad.const_data_ptr<float>(), *values = x.const_data_ptr<float>();
  const auto g = grad.strides(), s = x.strides();
  at::parallel_for(0, blocks * kernel[0], 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(kernel[1] * block);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / kernel[0] * block, row = task % kernel[0], count = std::min(block, channels - first);
      const int64_t down = row - padding[0];
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t h = std::max<int64_t>(0, -down); h < std::min(height, height - down); ++h)
          for (int64_t column = 0; column < kernel[1]; ++column) {
            const int64_t right = column - padding[1], from = std::max<int64_t>(0, -right);
            add_products(grads + b * g[0] + h * g[2] + from * g[3] + first, g[3],
                         values + b * s[0] + (h + down) * s[2] + (from + right) * s[3] + first, s[3],
                         std::min(width, width - right) - from, &sums[column * block], count);
          }
      for (int64_t c = 0; c < count; ++c)
        for (int64_t column = 0; column < kernel[1]; ++column)
          result[((first + c) * kernel[0] + row) * kernel[1] + column] = static_cast<float>(sums[column * block + c]);
    }
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(linvit_cpu, library) {
  library.def("depthwise_weight_gradient(Tensor grad, Tensor x, int[2] kernel, int[2] padding) -> Tensor");
}

TORCH_LIBRARY_IMPL(linvit_cpu, CPU, library) {
  library.impl("depthwise_weight_gradient", depthwise_weight_gradient);
}
