// Parameters that the host passes to the products of 8-bit operands with scales, and to the kernel that makes such
// operands. Plain C types only, as in gemm.h, which defines slots and rows.
//
// An operand is e4m3 values with scales: the number represented is a value times the scale of its block. A block is 128
// values of a row (activations), or 128 rows by 128 values (weights). k and the columns of every result are multiples
// of 128.
#pragma once

#include "moe/params/gemm.h"

namespace flashmoe::moe {

constexpr int kScaleBlock = 128;

// Memory holds two values per 16-bit element: in `gemm`, k, the strides of a and b and, if the result is e4m3, d_stride
// count such pairs. n counts weight rows. No biases.
//
//   grouped_gemm_scaled         d[row] = a[row] B_e: a [slots], d [slots, n] in 16 bits
//   grouped_gemm_gated_scaled   d[row] = activation(a[token(row)] B_e): a [tokens], d [slots, n / 2] e4m3 with d_scale
//   grouped_gemm_gated_scaled_kept
//                               the same, and preactivation[row] = a[token(row)] B_e, bf16
//   grouped_gemm_weight_gradient_scaled
//                               d[e] = sum over e's rows of a[row]^T b[row]: [n, k] in 16 bits; a has n and b k
//                               columns, both transposed; a_scale, b_scale: see moe/params/training.h. a_stride,
//                               b_stride: pairs, padded; k counts values
//   for few rows                the same, but the gated product's d is float32 without scales; d_stride counts floats
struct ScaledGemmParams {
  GemmParams gemm;
  const float* a_scale;  // [slots or tokens, k blocks]
  const float* b_scale;  // [experts, ceil(n / 128), k blocks]
  float* d_scale;        // gated, not for few rows: [slots, n / 2 / 128]; a row of zeros has a scale, too
  // plain, not for few rows: the previous grid writes only a and a_scale, and it let this one begin when expert_offsets
  // were written, so weights are requested before the previous grid has ended.
  int32_t overlaps_previous_grid;
};

// moe_quantize: values[row] and scales[row] of x[row]; scale = the largest magnitude, but at least 2^-100, / 448. Grid:
// two blocks of 128 values per warp.
struct QuantizeParams {
  const void* x;     // [rows, columns], 16 bits or float32
  void* values;      // [rows, columns] e4m3
  float* scales;     // [rows, columns / 128]
  int64_t x_stride;  // elements
  int32_t rows;
  int32_t columns;
  // The previous grid neither writes x nor uses the results' memory: this one waits for it at the end.
  int32_t overlaps_previous_grid;
};

}  // namespace flashmoe::moe
