// What the host passes to the kernel of the gradient of an additive mask. Plain C types only.
#pragma once

#include "attention/params/dropout.h"

namespace flashmoe::attention {

// The derivative with respect to the scores, after a softcap, is P * (D * dout v^T - row_dot), D that of dropout or 1. Its sum over the
// dimensions in which the mask has one element is the mask's gradient. backward.row_dot is read; dq, dk and dv are not touched.
struct BiasGradientParams {
  DropoutBackwardParams launched;  // dense rows and keys
  void* sums;       // [splits, batches, heads, rows, keys], contiguous; of element type where is_float is 0
  int32_t splits;   // parts of each sum, which are added later, each of a thread block
  int32_t batches;  // of the mask: 1, or the scores'
  int32_t heads;    // likewise
  int32_t
      rows;  // of sums: the scores'; folded, the kernel's block_m: row r has the sum over rows r, r + block_m, ... of the scores
  int32_t keys;  // likewise, of block_n
  int32_t folds_rows;
  int32_t folds_keys;
  int32_t is_float;
};

}  // namespace flashmoe::attention
