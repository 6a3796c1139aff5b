// Attention forward on the CPU: the functions that the host's operator calls.
#pragma once

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {

// out = softmax(scale * q k^T) v and lse, for any head_dim 1..512, seq_q, seq_k >= 0 and any strides with a contiguous
// last dimension. Reads from `params`: q, k, v, out, lse, the strides, the sizes and `scale`; the split and schedule
// fields are not used. A null lse is not written. Rows that see no key get out = 0, lse = -inf. NaN and Inf in keys
// that a row sees propagate as in a plain softmax. The result is the same bit for bit for any num_threads.
// num_threads: the number of threads to divide the work over (parallel_for's width); at least 1.
// Throws std::invalid_argument for sizes outside these ranges, and std::bad_alloc.
void attention_forward(const attention::ForwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                       int num_threads);

// The same for the sequences and score options of `params`, with head_dim_v: everything that MaskKind::kRuntime means.
// folded_heads must be 1. dropout: null for none.
void attention_forward_varlen(const attention::ForwardParams& params, ScalarType type,
                              const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads);

}  // namespace flashmoe::cpu
