// Attention's backward pass on the CPU: the functions that the host's operator calls.
#pragma once

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {

// Computes dq, dk and dv of params (see there), for any head_dim 1..512, seq_q, seq_k >= 0 and any strides with a
// contiguous last dimension. Not used: row_dot, tile_counter, scale_log2. A null dq is not computed, nor are dk and dv
// if both are null. A row and a key that do not see each other contribute nothing, even if they hold NaN or Inf. The
// result is the same bit for bit for any num_threads.
// num_threads: the number of threads to divide the work over (parallel_for's width); at least 1.
// Throws std::bad_alloc.
void attention_backward(const attention::BackwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                        int num_threads);

// The same for the sequences and score options of `params`, with head_dim_v: everything that MaskKind::kRuntime means.
// Rows and keys of no sequence are not written. dropout: null for none, otherwise that of the forward pass.
void attention_backward_varlen(const attention::BackwardParams& params, ScalarType type,
                               const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads);

}  // namespace flashmoe::cpu
