// The operators of linear attention on a CPU: forward and backward, bidirectional and causal.
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <string>

#include "bidirectional.h"
#include "causal.h"
#include "named.h"

namespace {

// Heads inside tokens where they lie so in `like`; channels are innermost.
at::Tensor room(const at::Tensor& like, int64_t width, bool filled) {
  const int64_t heads = like.size(1), tokens = like.size(2);
  const bool inside = like.stride(1) < like.stride(2);
  const std::vector<int64_t> strides = {heads * tokens * width, inside ? width : tokens * width,
                                        inside ? heads * width : width, 1};
  at::Tensor out = at::empty_strided({like.size(0), heads, tokens, width}, strides, like.options());
  return filled ? out.zero_() : out;
}

// Formulas are the places of names in linvit/kernels/support.py, or addresses of tables of formula.h.
template <typename Functions, size_t count>
Formula<Functions> formula_of(int64_t formula, const Functions* const (&named)[count],
                              const std::optional<at::Tensor>& parameters) {
  const auto* functions = formula < static_cast<int64_t>(count) ? named[formula]
                                                                : reinterpret_cast<const Functions*>(formula);
  if (!parameters) return {functions};
  return {functions, parameters->const_data_ptr<float>(), parameters->stride(0), parameters->stride(1),
          parameters->size(2)};
}

using Given = const std::optional<at::Tensor>&;

// Calls work(attention) of the kind that these arguments ask for.
template <typename Work>
void call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Given cos, Given sin, Given visible,
          Given cu_seqlens, Given order, Given cuts, Given mixing, Given query_parameters, Given key_parameters, Given normalizer_parameters, int64_t query_map,
          int64_t key_map, int64_t normalizer, bool query_mean, double eps, int64_t block, Work&& work) {
  const Rule rule{formula_of(query_map, MAPS, query_parameters),
                  formula_of(key_map, MAPS, key_parameters),
                  formula_of(normalizer, NORMALIZERS, normalizer_parameters),
                  query_mean,
                  static_cast<float>(eps),
                  {cos ? cos->const_data_ptr<float>() : nullptr, sin ? sin->const_data_ptr<float>() : nullptr}};
  const bool* shown = visible ? visible->const_data_ptr<bool>() : nullptr;
  Blocks blocks;
  if (mixing)
    blocks = {order->const_data_ptr<int64_t>(), cuts->const_data_ptr<int64_t>(), mixing->const_data_ptr<float>(),
              cuts->size(0) - 1};
  if (block > 0 && block < key.size(2))
    work(Causal(block, query, key, value, shown, cu_seqlens, rule));
  else
    work(Bidirectional(query, key, value, shown, cu_seqlens, rule, blocks));
}

// Refuses what would read or write outside the tensors; Python says what is wrong.
void check(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Given cos, Given sin) {
  const auto fits = [&](const at::Tensor& x) {
    return x.dim() == 4 && x.is_cpu() && x.layout() == at::kStrided && x.scalar_type() == query.scalar_type() &&
           x.numel() > 0 && x.size(0) == query.size(0) && x.size(1) == query.size(1);
  };
  const auto dtype = query.scalar_type();
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "wrong dtype");
  TORCH_CHECK(fits(query) && fits(key) && fits(value) && key.size(2) == value.size(2) && key.size(3) == query.size(3),
              "wrong tensors");
  for (Given table : {cos, sin})
    TORCH_CHECK(cos.has_value() == table.has_value() &&
                    (!table || (table->dim() == 2 && table->is_cpu() && table->scalar_type() == at::kFloat &&
                                table->is_contiguous() && table->size(0) == query.size(2) &&
                                table->size(0) == key.size(2) && 2 * table->size(1) == query.size(3))),
                "wrong tables");
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, Given cos, Given sin,
                  Given visible, Given cu_seqlens, Given order, Given cuts, Given mixing, Given query_parameters, Given key_parameters,
                  Given normalizer_parameters, int64_t query_map, int64_t key_map, int64_t normalizer, bool query_mean,
                  double eps, int64_t block) {
  check(query, key, value, cos, sin);
  at::Tensor out = room(query, value.size(3), false);
  call(query, key, value, cos, sin, visible, cu_seqlens, order, cuts, mixing, query_parameters, key_parameters, normalizer_parameters,
       query_map, key_map, normalizer, query_mean, eps, block, [&](auto&& attention) { attention.forward(out); });
  return out;
}

std::vector<at::Tensor> attend_backward(const at::Tensor& grad, const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, Given cos, Given sin, Given visible, Given cu_seqlens,
                                        Given order, Given cuts, Given mixing, Given query_parameters, Given key_parameters, Given normalizer_parameters,
                                        int64_t query_map, int64_t key_map, int64_t normalizer, bool query_mean,
                                        double eps, int64_t block) {
  const bool masks = visible.has_value();
  std::vector<at::Tensor> gradients{room(query, query.size(3), false), room(key, key.size(3), masks),
                                    room(value, value.size(3), masks)};
  call(query, key, value, cos, sin, visible, cu_seqlens, order, cuts, mixing, query_parameters, key_parameters, normalizer_parameters,
       query_map, key_map, normalizer, query_mean, eps, block, [&](auto&& attention) {
         attention.backward(grad, gradients[0], gradients[1], gradients[2]);
         if constexpr (requires { attention.grad_mixing; })
           if (mixing) gradients.push_back(attention.grad_mixing);
         for (at::Tensor& x : attention.parameter_gradients()) gradients.push_back(std::move(x));
       });
  return gradients;
}

}  // namespace

TORCH_LIBRARY(linvit_cpu, library) {
  const std::string inputs =
      "Tensor query, Tensor key, Tensor value, Tensor? cos, Tensor? sin, Tensor? visible, Tensor? cu_seqlens, "
      "Tensor? order, Tensor? cuts, Tensor? mixing, Tensor? query_parameters, Tensor? key_parameters, Tensor? normalizer_parameters, int query_map, int key_map, "
      "int normalizer, bool query_mean, float eps, int block)";
  library.def(("attend(" + inputs + " -> Tensor").c_str());
  library.def(("attend_backward(Tensor grad, " + inputs + " -> Tensor[]").c_str());
}

TORCH_LIBRARY_IMPL(linvit_cpu, CPU, library) {
  library.impl("attend", attend);
  library.impl("attend_backward", attend_backward);
}
