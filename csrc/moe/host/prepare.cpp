#include "moe/host/prepare.h"

#include "host/copies.h"

namespace flashmoe {
namespace moe {
namespace {

bool is_aligned(const Tensor& tensor) {
  constexpr int64_t kAlignBytes = host::kRowAlignElements * host::kElementBytes;
  return reinterpret_cast<uintptr_t>(tensor.data()) % kAlignBytes == 0;
}

// Of a dimension of more than one element: whole 16-byte pieces apart, and not the same memory again, which TMA cannot describe.
bool is_loadable_stride(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride % host::kRowAlignElements == 0);
}

}  // namespace

Tensor loadable_rows(const Tensor& tensor) {
  if (tensor.get() == nullptr) return Tensor();
  if (is_aligned(tensor) && is_loadable_stride(tensor.sizes()[0], tensor.strides()[0])) return host::alias(tensor);
  return host::padded_copy(tensor);
}

WeightOperand loadable_weights(const Tensor& tensor, bool is_transposed) {
  const ExpertWeights view = view_weights(tensor, is_transposed);
  const bool is_nk = view.stride_k == 1;
  const bool is_loadable = is_aligned(tensor) && is_loadable_stride(view.experts, view.stride_expert) &&
                           is_loadable_stride(is_nk ? view.n : view.k, is_nk ? view.stride_n : view.stride_k);
  if (is_loadable) return {host::alias(tensor), view};
  Tensor copied = host::padded_copy(tensor);
  const ExpertWeights copied_view = view_weights(copied, is_transposed);
  return {std::move(copied), copied_view};
}

Memory memory_of(const ExpertWeights& weights, bool is_paired) {
  if (weights.stride_k == 1) return Memory::kNk;
  return is_paired ? Memory::kKnPairs : Memory::kKn;
}

void set_weights(GemmParams& params, const ExpertWeights& weights) {
  params.b = weights.data;
  params.b_stride = weights.stride_k == 1 ? weights.stride_n : weights.stride_k;
  params.b_expert_stride = weights.stride_expert;
  params.experts = static_cast<int32_t>(weights.experts);
  params.n = static_cast<int32_t>(weights.n);
  params.k = static_cast<int32_t>(weights.k);
}

}  // namespace moe
}  // namespace flashmoe
