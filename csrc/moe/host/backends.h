// The two backends of the operators. Arguments are checked, and there is at least one slot, token or row. Outputs are
// allocated, uninitialised, and are written completely; outputs that are not given are not needed.
#pragma once

#include "host/tensor.h"
#include "moe/host/arguments.h"

namespace flashmoe::moe {

inline Tensor empty_on(const Common& common, std::initializer_list<int64_t> sizes, int32_t dtype) {
  return host::empty(sizes, dtype, common.device_type, common.device_index);
}
inline void zero(const Tensor& tensor) {
  if (tensor.is_given()) host::check_shim(aoti_torch_zero_(tensor.get()), "zero_");
}

void route_cpu(const RouteArguments& arguments, const RouteOutputs& outputs);
void route_cuda(const RouteArguments& arguments, const RouteOutputs& outputs);

void sort_cpu(const SortArguments& arguments, const SortOutputs& outputs);
void sort_cuda(const SortArguments& arguments, const SortOutputs& outputs);

void layer_cpu(const LayerArguments& arguments, const LayerOutputs& outputs);
void layer_cuda(const LayerArguments& arguments, const LayerOutputs& outputs);

void layer_backward_cpu(const LayerBackwardArguments& arguments, const LayerGradients& gradients);
void layer_backward_cuda(const LayerBackwardArguments& arguments, const LayerGradients& gradients);

// out [rows, n], contiguous.
void grouped_cpu(const GroupedArguments& arguments, const Tensor& out);
void grouped_cuda(const GroupedArguments& arguments, const Tensor& out);

// out [experts, n, k], contiguous.
void grouped_gradient_cpu(const GroupedGradientArguments& arguments, const Tensor& out);
void grouped_gradient_cuda(const GroupedGradientArguments& arguments, const Tensor& out);

// GPU only.
void scaled_cuda(const ScaledArguments& arguments, const LayerOutputs& outputs);
void scaled_backward_cuda(const ScaledBackwardArguments& arguments, const LayerGradients& gradients);
void quantize_weights_cuda(const QuantizeWeightsArguments& arguments, const QuantizedWeights& outputs);

// 4-bit weights.
void mxfp4_cpu(Mxfp4Arguments arguments, const Tensor& out);
void mxfp4_cuda(const Mxfp4Arguments& arguments, const Tensor& out);

void boxed_scaled(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void boxed_scaled_kept(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void boxed_scaled_backward(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);
void boxed_quantize_weights(StableIValue* stack, uint64_t num_arguments, uint64_t num_outputs);

}  // namespace flashmoe::moe
