// What the host passes to the products of 8-bit operands with scales, and to the kernel that makes such operands. Plain C types
// only, as in gemm.h, which says what slots and rows are.
//
// An operand is e4m3 values; a value times the scale of its block is the number that it stands for. Blocks are 128 values of a
// row (activations), or 128 rows by 128 values (weights). k and the columns of every result are multiples of 128.
#pragma once

#include "moe/params/gemm.h"

namespace flashmoe::moe {

constexpr int kScaleBlock = 128;

// Two values lie in memory as one 16-bit element: in `gemm` k, the strides of a and b, and where the result is e4m3 d_stride, count
// such pairs. n counts weight rows. No biases.
//
//   grouped_gemm_scaled         d[row] = a[row] B_e: a [slots], d [slots, n] in 16 bits
//   grouped_gemm_gated_scaled   d[row] = activation(a[token(row)] B_e): a [tokens], d [slots, n / 2] e4m3 with d_scale
//   grouped_gemm_gated_scaled_kept
//                               the same; preactivation[row] = a[token(row)] B_e, bf16
//   grouped_gemm_weight_gradient_scaled
//                               d[e] = sum over e's rows of a[row]^T b[row]: [n, k] in 16 bits; a [n] and b [k] columns, transposed, and
//                               what a_scale and b_scale are: moe/params/training.h. a_stride, b_stride: pairs, padded; k counts numbers
//   for few rows                the same, but the gated product's d is float32, without scales, and d_stride counts its numbers
struct ScaledGemmParams {
  GemmParams gemm;
  const float* a_scale;  // [slots or tokens, k blocks]
  const float* b_scale;  // [experts, ceil(n / 128), k blocks]
  float*
      d_scale;  // gated, not for few rows: [slots, n / 2 / 128]; a row without numbers other than 0 has a scale all the same
  // plain, not for few rows: the grid in front writes a and a_scale alone, and let this one begin when expert_offsets were there: weights
  // are requested before it has ended.
  int32_t is_early;
};

// moe_quantize: values[row] and scales[row] of x[row]; scale = the largest magnitude / 448, of at least 2^-100. Grid: a warp takes two
// blocks of a row.
struct QuantizeParams {
  const void* x;     // [rows, columns], 16 bits or float32
  void* values;      // [rows, columns] e4m3
  float* scales;     // [rows, columns / 128]
  int64_t x_stride;  // elements
  int32_t rows;
  int32_t columns;
  int32_t is_early;  // the grid in front neither writes x nor uses the results' memory: it is waited for at the end
};

}  // namespace flashmoe::moe
