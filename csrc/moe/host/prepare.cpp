#include "moe/host/prepare.h"

#include <utility>

#include "host/copies.h"

namespace flashmoe::moe {
namespace {

bool is_aligned(const Tensor& tensor) {
  constexpr int64_t kAlignBytes = host::kRowAlignElements * host::kElementBytes;
  return reinterpret_cast<uintptr_t>(tensor.data()) % kAlignBytes == 0;
}

// For a dimension of more than one element: a multiple of 16 bytes, and not 0, which TMA cannot describe.
bool is_loadable_stride(int64_t size, int64_t stride) {
  return size <= 1 || (stride > 0 && stride % host::kRowAlignElements == 0);
}

}  // namespace

Tensor loadable_rows(const Tensor& tensor) {
  if (!tensor.is_given()) return Tensor();
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

WeightLayout layout_of(const ExpertWeights& weights, bool is_interleaved) {
  if (weights.stride_k == 1) return WeightLayout::kNk;
  return is_interleaved ? WeightLayout::kKnPairs : WeightLayout::kKn;
}

Sorted pointers_of(const SortOutputs& sorted) {
  return {static_cast<int32_t*>(sorted.expert_offsets.data()), static_cast<int32_t*>(sorted.row_slots.data()),
          static_cast<int32_t*>(sorted.slot_rows.data()), static_cast<float*>(sorted.row_weights.data())};
}

void set_weights(GemmParams& params, const ExpertWeights& weights) {
  params.b = weights.data;
  params.b_stride = weights.stride_k == 1 ? weights.stride_n : weights.stride_k;
  params.b_expert_stride = weights.stride_expert;
  params.experts = static_cast<int32_t>(weights.experts);
  params.n = static_cast<int32_t>(weights.n);
  params.k = static_cast<int32_t>(weights.k);
}

void set_layer(GemmParams& params, const LayerShape& shape, const Sorted& sorted) {
  params.row_weights = sorted.row_weights;
  params.expert_offsets = sorted.expert_offsets;
  params.experts = static_cast<int32_t>(shape.experts);
  params.slots = static_cast<int32_t>(shape.slots);
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.activation = shape.activation;
  params.is_interleaved = shape.is_interleaved ? 1 : 0;
}

void set_operands(GemmParams& params, const Rows& a, void* d, int64_t d_stride) {
  params.a = a.data;
  params.a_stride = a.stride;
  params.a_slots = a.slots;
  params.d = d;
  params.d_stride = d_stride;
}

void set_weight_gradient(GemmParams& params, const LayerShape& shape, Rows n_rows, Rows k_rows,
                         const Tensor& gradient) {
  if (shape.is_transposed) std::swap(n_rows, k_rows);
  set_operands(params, n_rows, gradient.data(), k_rows.columns);
  params.b = k_rows.data;
  params.b_stride = k_rows.stride;
  params.b_slots = k_rows.slots;
  params.n = static_cast<int32_t>(n_rows.columns);
  params.k = static_cast<int32_t>(k_rows.columns);
}

void set_grouped(GemmParams& params, const GroupedArguments& arguments, const Tensor& a, const int32_t* offsets,
                 const Tensor& out) {
  set_operands(params, token_rows(a, nullptr), out.data(), params.n);
  params.expert_offsets = offsets;
  params.bias = data_or_null(arguments.bias);
  params.slots = params.tokens = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
}

void set_grouped_gradient(GemmParams& params, const GroupedGradientArguments& arguments, const Tensor& a,
                          const Tensor& b, const int32_t* offsets, const Tensor& out) {
  set_weight_gradient(params, LayerShape(), token_rows(a, nullptr), token_rows(b, nullptr), out);
  params.expert_offsets = offsets;
  params.experts = static_cast<int32_t>(arguments.experts);
  params.slots = params.tokens = static_cast<int32_t>(arguments.rows);
  params.top_k = 1;
}

RouteParams route_params(const RouteArguments& arguments, const RouteOutputs& outputs) {
  RouteParams params{};
  params.logits = arguments.logits.data();
  params.bias = static_cast<const float*>(data_or_null(arguments.bias));
  params.weights = static_cast<float*>(outputs.weights.data());
  params.ids = static_cast<int32_t*>(outputs.ids.data());
  params.counts = static_cast<int32_t*>(outputs.counts.data());
  params.logits_stride = arguments.logits.strides()[0];
  params.logits_dtype = scalar_of(arguments.logits);
  params.scoring = arguments.scoring;
  params.tokens = static_cast<int32_t>(arguments.tokens);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.top_k = static_cast<int32_t>(arguments.top_k);
  params.groups = static_cast<int32_t>(arguments.groups);
  params.topk_groups = static_cast<int32_t>(arguments.topk_groups);
  params.renormalize = arguments.renormalize ? 1 : 0;
  params.scale = static_cast<float>(arguments.scale);
  return params;
}

SortParams sort_params(const SortArguments& arguments, const Sorted& sorted) {
  SortParams params{};
  params.ids = arguments.ids.data();
  params.topk_weights = arguments.topk_weights.data();
  params.expert_map = static_cast<const int32_t*>(data_or_null(arguments.expert_map));
  params.expert_offsets = sorted.expert_offsets;
  params.row_slots = sorted.row_slots;
  params.slot_rows = sorted.slot_rows;
  params.row_weights = sorted.row_weights;
  params.ids_dtype = scalar_of(arguments.ids);
  params.weights_dtype = scalar_of(arguments.topk_weights);
  params.slots = static_cast<int32_t>(arguments.slots);
  params.experts = static_cast<int32_t>(arguments.experts);
  params.ids_end = static_cast<int32_t>(arguments.ids_end);
  return params;
}

namespace {

// Common to both directions.
CombineParams make_combine(const LayerShape& shape, const Sorted& sorted, const Tensor& out, const void* rows) {
  CombineParams params{};
  params.rows = rows;
  params.out = data_or_null(out);
  params.out_stride = out.is_given() ? out.strides()[0] : shape.hidden;
  params.slot_rows = sorted.slot_rows;
  params.tokens = static_cast<int32_t>(shape.tokens);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.columns = static_cast<int32_t>(shape.hidden);
  params.experts = static_cast<int32_t>(shape.experts);
  return params;
}

}  // namespace

CombineParams combine_params(const LayerShape& shape, const Sorted& sorted, const Tensor& shared, const Tensor& out,
                             const void* rows) {
  CombineParams params = make_combine(shape, sorted, out, rows);
  params.shared = data_or_null(shared);
  params.shared_stride = params.shared != nullptr ? shared.strides()[0] : 0;
  params.row_weights = sorted.row_weights;
  return params;
}

CombineParams combine_backward_params(const LayerShape& shape, const Sorted& sorted, const LayerGradients& gradients,
                                      const Tensor& b2, const Tensor& dout, const void* rows, const float* row_dots,
                                      int64_t dot_columns) {
  CombineParams params = make_combine(shape, sorted, gradients.dx, rows);
  params.row_dots = row_dots;
  params.dot_tiles = static_cast<int32_t>(ceil_div(shape.intermediate, dot_columns));
  params.dweights = static_cast<float*>(data_or_null(gradients.dweights));
  params.bias = data_or_null(b2);
  params.dout = dout.data();
  params.dout_stride = dout.strides()[0];
  params.expert_offsets = sorted.expert_offsets;
  return params;
}

BiasGradientParams bias_gradient_params(const LayerShape& shape, const Sorted& sorted, const Rows& rows,
                                        const float* row_weights, const Tensor& gradient) {
  BiasGradientParams params{};
  params.a = rows.data;
  params.a_stride = rows.stride;
  params.a_slots = rows.slots;
  params.d = gradient.data();
  params.row_weights = row_weights;
  params.expert_offsets = sorted.expert_offsets;
  params.experts = static_cast<int32_t>(shape.experts);
  params.top_k = static_cast<int32_t>(shape.top_k);
  params.columns = static_cast<int32_t>(rows.columns);
  return params;
}

}  // namespace flashmoe::moe
