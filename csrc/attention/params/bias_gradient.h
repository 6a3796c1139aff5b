// What the host passes to the kernel of the gradient of an additive mask. Plain C types only.
#pragma once

#include "attention/params/dropout.h"

namespace flashmoe {
namespace attention {

// The derivative with respect to the scores, after a softcap, is P * (D * dout v^T - row_dot), D that of dropout or 1. Its sum over the
// dimensions in which the mask has one element is the mask's gradient. backward.row_dot is read; dq, dk and dv are not touched.
struct BiasGradientParams {
  DropoutBackwardParams launched;  // dense rows and keys
  void* sums;  // [splits, batches, heads, rows, keys], contiguous; of element type where is_float is 0. Where rows, or keys, are folded, row r
               // is the sum over rows r, r + block_m, ... of the scores; rows past block_m are not written
  int32_t splits;   // of each sum, which are added later: the items of one are divided over this many thread blocks
  int32_t batches;  // of the mask: 1, or the scores'
  int32_t heads;    // likewise
  int32_t rows;     // of sums: the scores', or at least the kernel's block_m
  int32_t keys;     // the scores', or at least block_n
  int32_t folds_rows;
  int32_t folds_keys;
  int32_t is_float;
};

}  // namespace attention
}  // namespace flashmoe
