// From the operators' arguments to what the kernels can work on: copies of what they cannot load, parameter blocks.
#pragma once

#include "moe/host/arguments.h"
#include "moe/host/select.h"

namespace flashmoe {
namespace moe {

// A matrix of tokens that every kernel can load: the tensor itself, or a copy where its rows overlap or are not 16-byte aligned.
// No handle stays none.
Tensor loadable_rows(const Tensor& tensor);

// Weights that every kernel can load, and the tensor that holds them; likewise.
struct WeightOperand {
  Tensor owner;
  ExpertWeights view;
};
WeightOperand loadable_weights(const Tensor& tensor, bool is_transposed);

// How a kernel finds the weights; `is_paired`: of a gated product, gate and up in turn.
Memory memory_of(const ExpertWeights& weights, bool is_paired);

// n, k, b and its strides.
void set_weights(GemmParams& params, const ExpertWeights& weights);

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// The address that a kernel gets; null for a tensor without a handle.
inline void* data_or_null(const Tensor& tensor) { return tensor.get() != nullptr ? tensor.data() : nullptr; }

}  // namespace moe
}  // namespace flashmoe
