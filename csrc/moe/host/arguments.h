// Arguments and results of the operators of a mixture-of-experts layer, and the only place that validates them: a
// violated rule is thrown by its name, which flashmoe/moe/rules.py explains.
//
// In what take_...() returns, and so in every backend: tensors are on one device; x, shared, out and the other matrices
// of tokens have a contiguous last dimension and any stride between rows (0 if expanded); weights have a contiguous
// last or second-last dimension, as ExpertWeights says, and otherwise any strides; everything else is contiguous.
// Tensors that were not like this have been copied.
#pragma once

#include <cstdint>

#include "host/arguments.h"
#include "host/kernel_table.h"
#include "host/tensor.h"
#include "moe/params/gemm.h"
#include "moe/params/routing.h"

namespace flashmoe::moe {

using host::Dtype;
using host::Tensor;

constexpr int64_t kMaxExperts = 1024;
constexpr int64_t kMaxTopK = 32;
constexpr int64_t kMaxGroups = 32;

// Common to all tensors of an operator.
struct Common {
  Dtype dtype = Dtype::kFloat32;  // of x, the weights, biases and the output
  int32_t torch_dtype = 0;
  int32_t device_type = 0;
  int32_t device_index = 0;
};

// Weights of all experts, viewed as [experts, n, k] of a product d[row, n] = sum over k of a[row, k] *
// weights[e, n, k], whatever their strides. One of stride_n and stride_k is 1.
struct ExpertWeights {
  const void* data = nullptr;
  int64_t experts = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t stride_expert = 0;  // elements, here and below; 0: all experts share one matrix
  int64_t stride_n = 0;
  int64_t stride_k = 0;
};

// The same with n and k swapped, for a gradient: d[row, k] = sum over n.
inline ExpertWeights swapped(const ExpertWeights& weights) {
  ExpertWeights other = weights;
  other.n = weights.k;
  other.k = weights.n;
  other.stride_n = weights.stride_k;
  other.stride_k = weights.stride_n;
  return other;
}

// Views w13 as [experts, 2 * intermediate, hidden] and w2 as [experts, hidden, intermediate]; `is_transposed`: the
// tensor has the last two dimensions swapped.
ExpertWeights view_weights(const Tensor& tensor, bool is_transposed);

// Tokens, sizes and what the layer computes, for both passes. slots = tokens * top_k is below 2^31.
struct LayerShape {
  int64_t tokens = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t slots = 0;
  Activation activation = Activation::kSwiglu;
  bool is_interleaved = false;
  bool is_transposed = false;  // of w13, w2 and their gradients
};

struct SortArguments {
  Common common;        // dtype: of topk_weights; float32 or a 16-bit type
  Tensor ids;           // [tokens, top_k] or any other shape, int32 or int64
  Tensor topk_weights;  // of ids' shape
  Tensor expert_map;    // [ids_end] int32; optional: is_given()
  int64_t slots = 0;
  int64_t experts = 0;
  int64_t ids_end = 0;  // ids outside [0, ids_end) have no expert: expert_map's size, or experts
};

struct SortOutputs {
  Tensor expert_offsets;  // [experts + 1] int32
  Tensor row_slots;       // [slots] int32, -1 past the last row
  Tensor slot_rows;       // [slots] int32, -1: no expert
  Tensor row_weights;     // [slots] float32, 0 past the last row
};

struct LayerArguments {
  Common common;
  LayerShape shape;
  Tensor x;       // [tokens, hidden]
  Tensor w13;     // [experts, 2 * intermediate, hidden]; see view_weights
  Tensor w2;      // [experts, hidden, intermediate]
  Tensor b13;     // [experts, 2 * intermediate], in the order of w13's rows; optional, as b2 and shared
  Tensor b2;      // [experts, hidden]
  Tensor shared;  // [tokens, hidden]
  SortArguments routing;
};

// With e4m3 weights; common: that of the output.
struct ScaledArguments : LayerArguments {
  Tensor w13_scale;  // [experts, ceil(2 * intermediate / 128), ceil(hidden / 128)] float32
  Tensor w2_scale;   // [experts, ceil(hidden / 128), ceil(intermediate / 128)] float32
  Tensor x_scale;    // [tokens, ceil(hidden / 128)] float32, for x in e4m3; not given: x has 16 bits
};

// With 4-bit weights: w13 uint8 [experts, 2 * intermediate, hidden / 2], w2 [experts, hidden, intermediate / 2]; or
// packed, [experts, 2 * intermediate / 64, hidden / 64, kMxfp4PackedBytes] and
// [experts, hidden / 64, intermediate / 64, ...], without scales.
struct Mxfp4Arguments : LayerArguments {
  bool is_packed = false;
  Tensor w13_scale;  // [experts, 2 * intermediate, hidden / 32] uint8
  Tensor w2_scale;   // [experts, hidden, intermediate / 32] uint8
};

struct LayerOutputs {
  Tensor out;  // [tokens, hidden]
  // For a backward pass; not given: the backend uses its own memory.
  Tensor preactivation;  // [slots, 2 * intermediate], by row; rows past the last are undefined
  SortOutputs sorted;

  bool is_for_backward() const { return preactivation.is_given(); }
};

// Bits of `needs`, in the order of the gradients.
enum Gradient : int64_t { kNeedX = 1, kNeedW13 = 2, kNeedW2 = 4, kNeedWeights = 8, kNeedB13 = 16, kNeedB2 = 32 };

struct LayerBackwardArguments {
  Common common;
  LayerShape shape;
  Tensor dout;  // [tokens, hidden]
  Tensor x;
  Tensor w13;
  Tensor w2;
  Tensor b13;            // only its presence matters
  Tensor b2;             // enters the gradient of topk_weights
  Tensor preactivation;  // as the forward pass wrote it
  SortOutputs sorted;
  int64_t needs = 0;      // bits of Gradient
  bool consumes = false;  // the preactivation may be overwritten by its gradient
};

// Gradients that are not needed are not given.
struct LayerGradients {
  Tensor dx;        // [tokens, hidden]
  Tensor dw13;      // w13's shape, contiguous
  Tensor dw2;       // w2's shape, contiguous
  Tensor dweights;  // [tokens, top_k] float32
  Tensor db13;      // [experts, 2 * intermediate]
  Tensor db2;       // [experts, hidden]
};

// For a layer with e4m3 weights made from 16-bit ones; the weights are transposed, as the backward products take them.
struct ScaledBackwardArguments {
  Common common;
  LayerShape shape;
  Tensor dout;           // [tokens, hidden]
  Tensor x;              // [tokens, hidden]
  Tensor w13;            // [experts, hidden, 2 * intermediate] e4m3
  Tensor w2;             // [experts, intermediate, hidden] e4m3
  Tensor w13_scale;      // [experts, hidden / 128, 2 * intermediate / 128] float32
  Tensor w2_scale;       // [experts, intermediate / 128, hidden / 128] float32
  Tensor preactivation;  // as the forward pass wrote it
  SortOutputs sorted;
  int64_t needs = 0;  // bits of Gradient, of the first four
};

struct QuantizeWeightsArguments {
  Common common;
  Tensor weights;  // [experts, n, k], contiguous
};

// e4m3 values and float32 scales, for blocks of 128 by 128; then the same for the transpose.
struct QuantizedWeights {
  Tensor values;             // [experts, n, k]
  Tensor scales;             // [experts, n / 128, k / 128]
  Tensor transposed;         // [experts, k, n]
  Tensor transposed_scales;  // [experts, k / 128, n / 128]
};

struct RouteArguments {
  Common common;  // dtype: of logits
  Tensor logits;  // [tokens, experts], last dimension contiguous
  Tensor bias;    // [experts] float32; optional
  int64_t tokens = 0;
  int64_t experts = 0;
  int64_t top_k = 0;
  Scoring scoring = Scoring::kSoftmax;
  int64_t groups = 1;
  int64_t topk_groups = 1;
  bool renormalize = false;
  double scale = 1.0;
};

struct RouteOutputs {
  Tensor weights;  // [tokens, top_k] float32
  Tensor ids;      // [tokens, top_k] int32
  Tensor counts;   // [experts] int32
};

// out[row] = a[row] b[e]; rows past the last offset become zeros.
struct GroupedArguments {
  Common common;
  Tensor a;         // [rows, k]
  ExpertWeights b;  // as [experts, n, k]; the tensor is [experts, k, n]
  Tensor b_owner;   // the tensor
  Tensor offsets;   // [experts] int32, the end of each expert's rows, ascending; not given: one expert has all rows
  Tensor bias;      // [experts, n]; optional
  int64_t rows = 0;
};

// out[e] = sum over e's rows of a[row]^T b[row], [n, k]; zeros for an expert without rows.
struct GroupedGradientArguments {
  Common common;
  Tensor a;        // [rows, n]: the operator's a, [n, rows], transposed
  Tensor b;        // [rows, k]
  Tensor offsets;  // [experts] int32
  int64_t rows = 0;
  int64_t experts = 0;
};

// Each takes an operator's arguments in the order of its schema and throws at the first violated rule; fills in the
// structs' other members, and copies what must be contiguous.
RouteArguments parse_route(host::Arguments& given);
SortArguments parse_sort(host::Arguments& given);
LayerArguments parse_layer(host::Arguments& given);
LayerBackwardArguments parse_layer_backward(host::Arguments& given);
GroupedArguments parse_grouped(host::Arguments& given);
GroupedGradientArguments parse_grouped_gradient(host::Arguments& given);
ScaledArguments parse_scaled(host::Arguments& given);
Mxfp4Arguments parse_mxfp4(host::Arguments& given);
ScaledBackwardArguments parse_scaled_backward(host::Arguments& given);
QuantizeWeightsArguments parse_quantize_weights(host::Arguments& given);

// For an output that the caller passes.
void check_out(const LayerArguments& arguments, const Tensor& out);
// What the e4m3 kernels need in addition to parse_scaled: whole blocks.
void check_blocks(const LayerShape& shape);

// The Scalar of a tensor's dtype: float32, float16, bfloat16, int32 or int64.
Scalar scalar_of(const Tensor& tensor);

}  // namespace flashmoe::moe
