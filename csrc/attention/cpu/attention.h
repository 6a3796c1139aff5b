// Attention forward on the CPU: what the host's operator calls.
#pragma once

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"
#include "cpu/thread_pool.h"

namespace flashmoe::cpu {

// out = softmax(scale * q k^T) v and lse, for any head_dim 1..512, seq_q, seq_k >= 0 and any strides with a
// contiguous last dimension. Reads of `params`: q, k, v, out, lse, the strides, the sizes and `scale`; the
// split and schedule fields are not used; a null lse is not written. Rows that see no key get out = 0, lse = -inf. NaN
// and Inf propagate as in a plain softmax, from the keys that a row can see. The result does not depend on num_threads,
// bit for bit.
// num_threads: how many threads to divide the work over (parallel_for's width); at least 1.
// Throws std::invalid_argument for sizes outside of the above, std::bad_alloc.
void attention_forward(const attention::ForwardParams& params, ScalarType type, bool causal, ParallelFor parallel_for,
                       int num_threads);

// The same of params' entries and band, with head_dim_v: whatever MaskKind::kRuntime means. folded_heads must be 1. dropout: null for none.
void attention_forward_varlen(const attention::ForwardParams& params, ScalarType type,
                              const attention::Dropout* dropout, ParallelFor parallel_for, int num_threads);

}  // namespace flashmoe::cpu
