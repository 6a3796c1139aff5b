// Prepares the operators' arguments for the kernels and the steps on the CPU: copies of what a kernel cannot load, and
// parameter structs.
#pragma once

#include "host/ceil_div.h"
#include "moe/host/arguments.h"
#include "moe/host/select.h"

namespace flashmoe::moe {

// The address that a kernel gets; null if there is no tensor.
inline void* data_or_null(const Tensor& tensor) { return tensor.is_given() ? tensor.data() : nullptr; }

// A matrix of tokens that every kernel can load: the tensor itself, or a copy if its rows overlap or are not 16-byte
// aligned. If no tensor is given, none is returned.
Tensor loadable_rows(const Tensor& tensor);

// Weights that every kernel can load: the tensor itself or a copy, and a view of it.
struct WeightOperand {
  Tensor owner;
  ExpertWeights view;
};
WeightOperand loadable_weights(const Tensor& tensor, bool is_transposed);

// The memory layout of the weights; `is_interleaved`: gated product whose gate and up alternate.
WeightLayout layout_of(const ExpertWeights& weights, bool is_interleaved);

// What moe_sort writes, in tensors or in a workspace.
struct Sorted {
  int32_t* expert_offsets;  // [experts + 1]
  int32_t* row_slots;       // [slots]
  int32_t* slot_rows;       // [slots]
  float* row_weights;       // [slots]
};
Sorted pointers_of(const SortOutputs& sorted);

// A matrix with one row per sorted slot, or of tokens: then the slot of each row says which token it is.
struct Rows {
  const void* data;
  int64_t stride;
  int64_t columns;
  const int32_t* slots;  // null: one row per sorted slot
};
inline Rows token_rows(const Tensor& tensor, const int32_t* slots) {
  return {tensor.data(), tensor.strides()[0], tensor.sizes()[1], slots};
}
inline Rows sorted_rows(const void* data, int64_t columns) { return {data, columns, columns, nullptr}; }

// n, k, b and its strides.
void set_weights(GemmParams& params, const ExpertWeights& weights);
// The sort's results and the layer's sizes and options, for every product of the layer.
void set_layer(GemmParams& params, const LayerShape& shape, const Sorted& sorted);
// d = the product of `a` and the weights.
void set_operands(GemmParams& params, const Rows& a, void* d, int64_t d_stride);
// gradient[e] = sum over e's rows of n_rows^T k_rows; for transposed weights the two are swapped.
void set_weight_gradient(GemmParams& params, const LayerShape& shape, Rows n_rows, Rows k_rows, const Tensor& gradient);
void set_grouped(GemmParams& params, const GroupedArguments& arguments, const Tensor& a, const int32_t* offsets,
                 const Tensor& out);
void set_grouped_gradient(GemmParams& params, const GroupedGradientArguments& arguments, const Tensor& a,
                          const Tensor& b, const int32_t* offsets, const Tensor& out);

RouteParams route_params(const RouteArguments& arguments, const RouteOutputs& outputs);
// Leaves block_counts unset.
SortParams sort_params(const SortArguments& arguments, const Sorted& sorted);
// out = shared + the weighted sum of each token's rows.
CombineParams combine_params(const LayerShape& shape, const Sorted& sorted, const Tensor& shared, const Tensor& out,
                             const void* rows);
// dx = the sum of each token's rows, and the gradient of the slots' weights from `row_dots` [dot_tiles][slots].
CombineParams combine_backward_params(const LayerShape& shape, const Sorted& sorted, const LayerGradients& gradients,
                                      const Tensor& b2, const Tensor& dout, const void* rows, const float* row_dots,
                                      int64_t dot_columns);
BiasGradientParams bias_gradient_params(const LayerShape& shape, const Sorted& sorted, const Rows& rows,
                                        const float* row_weights, const Tensor& gradient);

// Whether the gradients of tokens or of their weights are needed; and whether any that needs the preactivation's
// gradient is.
inline bool needs_rows(const LayerBackwardArguments& arguments) {
  return (arguments.needs & (kNeedX | kNeedWeights)) != 0;
}
inline bool needs_dz(const LayerBackwardArguments& arguments) { return (arguments.needs & ~kNeedB2) != 0; }

}  // namespace flashmoe::moe
