// Attention's backward pass on the CPU: what the host's operator calls.
#pragma once

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {

// dq, dk and dv of params (see there), for any head_dim 1..512, seq_q, seq_k >= 0 and any strides with a contiguous last
// dimension. Not used: row_dot, tile_counter, scale_log2. A null dq is not computed, nor are dk and dv where both are
// null. A row and a key that do not see each other contribute nothing, even where they hold NaN or Inf. The result does
// not depend on num_threads, bit for bit.
// num_threads: how many threads to divide the work over (parallel_for's width); at least 1.
// Throws std::bad_alloc.
void attention_backward(const attention::BackwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                        int num_threads);

// The same of params' entries and band, with head_dim_v: whatever MaskKind::kRuntime means. Rows and keys of no entry are left alone.
// dropout: null for none, else that of the forward pass.
void attention_backward_varlen(const attention::BackwardParams& params, ScalarType type,
                               const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads);

}  // namespace flashmoe::cpu
