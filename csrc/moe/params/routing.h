// Parameters that the host passes to the kernels around the grouped matrix products: choosing experts, sorting by
// expert, combining. Plain C types only, as in gemm.h, which defines slots and rows.
#pragma once

#ifdef __CUDACC_RTC__
using int32_t = int;
using int64_t = long long;
#else
#include <cstdint>
#endif

namespace flashmoe::moe {

enum class Scoring : int32_t {
  kSoftmax,      // softmax over all experts, then the top k; the bias only affects the choice
  kTopkSoftmax,  // the top k logits (+ bias), then softmax over them
  kSigmoid,      // sigmoid of each logit; the bias only affects the choice
};

enum class Scalar : int32_t { kFloat32, kFloat16, kBFloat16, kInt32, kInt64 };  // of tensors whose dtype is a parameter

// moe_route: the top k experts of each token, largest first, ties by the lower id; a NaN counts as the largest, as in
// torch.topk. Groups of experts are kept by the sum of their two largest scores (+ bias) if the scoring is sigmoid
// (DeepSeek-V3), else by their largest score (DeepSeek-V2). At most 1024 experts, 32 choices and 32 groups; the kept
// groups hold at least top_k experts.
struct RouteParams {
  const void* logits;  // [tokens, experts]
  const float* bias;   // [experts]; null: none
  float* weights;      // [tokens, top_k]
  int32_t* ids;        // [tokens, top_k]
  int32_t* counts;     // [experts], how many tokens chose each expert; zeroed by the host
  int64_t logits_stride;
  Scalar logits_dtype;
  Scoring scoring;
  int32_t tokens;
  int32_t experts;
  int32_t top_k;
  int32_t groups;       // number of groups of equal size that the experts are in; 1: no groups
  int32_t topk_groups;  // groups that are kept
  int32_t renormalize;  // divide the weights by their sum
  float scale;          // then multiply them by this
};

enum class SortStep : int32_t { kOne, kCount, kPlace };  // as in the axis `step` of operations.toml

// moe_sort: stable counting sort of slots by expert, for at most 1024 experts. One launch of one block (step one), or
// two launches with the same grid: each block counts its share of the slots (count), then places it (place).
struct SortParams {
  const void* ids;            // [slots], int32 or int64; ids outside [0, ids_end): no expert
  const void* topk_weights;   // [slots], fp32, fp16 or bf16
  const int32_t* expert_map;  // [ids_end] expert of this layer, outside [0, experts): none; null: the id itself
  int32_t* expert_offsets;    // [experts + 1], written
  int32_t* row_slots;         // [slots], by row, written; -1 past the last row
  int32_t* slot_rows;         // [slots], by slot, written; -1: no expert
  float* row_weights;         // [slots], by row, written; 0 past the last row
  int32_t* block_counts;      // [blocks][experts], workspace of count and place
  Scalar ids_dtype;
  Scalar weights_dtype;
  int32_t slots;
  int32_t experts;
  int32_t ids_end;
};

// moe_combine: out[t] = shared[t] + sum over choices, in their order, of row_weights[row] * rows[row], in fp32.
// moe_combine_backward: dx[t] = sum over choices of rows[row]; dweights[slot] = sum over tiles, in order, of
// row_dots[tile][row], plus dout[t] . b2[expert] if b2 is given. Grid: a multiple of the number of tokens; at most 32
// choices.
struct CombineParams {
  const void* rows;               // [slots, columns], by row
  const void* shared;             // [tokens, columns]; null: none
  void* out;                      // [tokens, columns]; backward: null: not requested
  const float* row_weights;       // [slots], by row; null: 1
  const int32_t* slot_rows;       // [slots]; -1: no row
  const float* row_dots;          // backward: [dot_tiles][slots]
  float* dweights;                // backward: [slots], written; 0 if the slot has no row; null: not requested
  const void* bias;               // backward: b2 [experts, columns]; null: none
  const void* dout;               // backward, with bias: [tokens, columns]
  const int32_t* expert_offsets;  // backward, with bias: [experts + 1]
  int64_t shared_stride;
  int64_t out_stride;
  int64_t dout_stride;
  int32_t tokens;
  int32_t top_k;
  int32_t columns;
  int32_t experts;
  int32_t dot_tiles;
};

// moe_gather: rows[slot_rows[slot]] = a[slot / top_k]; rows past the experts' last one are not written. One warp per
// token; at most 32 choices.
struct GatherParams {
  const void* a;             // [tokens, columns]
  void* rows;                // [slots, columns]
  const int32_t* slot_rows;  // [slots]; -1: no row
  int64_t a_stride;
  int32_t tokens;
  int32_t top_k;
  int32_t columns;  // a multiple of 8
};

// moe_bias_gradient: d[e] = sum over e's rows of row_weights[row] * a[a_row], in fp32, in an order that depends only on
// the number of e's rows, rounded once. Grid: experts * ceil(columns / 64).
struct BiasGradientParams {
  const void* a;                  // [tokens or slots, columns]
  void* d;                        // [experts, columns]
  const float* row_weights;       // null: 1
  const int32_t* expert_offsets;  // [experts + 1]
  const int32_t* a_slots;         // as in GemmParams
  int64_t a_stride;
  int32_t experts;
  int32_t top_k;
  int32_t columns;
};

}  // namespace flashmoe::moe
