// A mixture-of-experts layer on the CPU, step by step: the functions take the parameters of the GPU's kernels
// (moe/params), with all memory on the CPU. Bit for bit, nothing depends on the number of threads, and a row's result
// does not depend on the other rows.
#pragma once

#include <cstdint>

#include "cpu/scalar_types.h"
#include "cpu/thread_pool.h"
#include "moe/cpu/kernel.h"

namespace flashmoe::cpu {

struct Pool {
  ParallelFor parallel_for;
  int num_threads;  // at least 1
};

// One of the four products of GemmParams; any n, k, strides. Throws std::bad_alloc.
// is_kn: weights [experts, k, n]; with is_interleaved the columns of gate and up alternate in both layouts.
void moe_multiply(const moe::GemmParams& params, MoeProduct product, ScalarType type, bool is_kn, const Pool& pool);

// One expert's 4-bit weights (moe/params/mxfp4.h), expanded to bf16 [n, k].
struct Mxfp4Weights {
  const uint8_t* codes;   // [n, k / 2]
  int64_t codes_stride;   // bytes
  const uint8_t* scales;  // [n, k / 32]
  uint16_t* weights;      // written
  int64_t n;
  int64_t k;
};
void moe_expand_mxfp4(const Mxfp4Weights& expert, const Pool& pool);

// The columns that one element of kGatedBackward's row_dots sums over.
int32_t moe_dot_columns();

// out and, if dweights is given, the gradient of the slots' weights; see CombineParams.
void moe_combine(const moe::CombineParams& params, ScalarType type, const Pool& pool);

void moe_bias_gradient(const moe::BiasGradientParams& params, ScalarType type, const Pool& pool);

// Stable counting sort of slots by expert; on one thread, because it only moves a few bytes per slot.
void moe_sort(const moe::SortParams& params);

// Also on one thread; counts need not be zeroed before.
void moe_route(const moe::RouteParams& params);

}  // namespace flashmoe::cpu
