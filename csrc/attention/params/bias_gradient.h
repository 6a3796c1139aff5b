// What the host passes to the kernel that computes the gradient of an additive mask. Plain C types only.
#pragma once

#include "attention/params/dropout.h"

namespace flashmoe::attention {

// The derivative with respect to the scores after the softcap is P * (D * dout v^T - row_dot), with D from dropout, or
// 1. The mask's gradient is its sum over the dimensions in which the mask has one element. Reads backward.row_dot; does
// not touch dq, dk and dv.
struct BiasGradientParams {
  DropoutBackwardParams launched;  // dense rows and keys
  void* sums;                      // [splits, batches, heads, rows, keys], contiguous; of element type if is_float is 0
  int32_t splits;                  // partial sums per sum, one per thread block, which are added later
  int32_t batches;                 // of the mask: 1, or the scores'
  int32_t heads;                   // of the mask: 1, or the scores'
  // Of sums: the scores'; if folded, the kernel's block_m: row r sums rows r, r + block_m, ... of the scores.
  int32_t rows;
  int32_t keys;  // the same for keys, with block_n
  int32_t folds_rows;
  int32_t folds_keys;
  int32_t is_float;
};

}  // namespace flashmoe::attention
