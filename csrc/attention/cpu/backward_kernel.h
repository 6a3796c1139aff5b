// Shared by the dispatcher of the backward pass and the translation units of the instruction sets. Plain data and
// declarations only: see kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"

namespace flashmoe::cpu {

// Query rows [row_begin, row_end) of query heads [head_begin, head_end) against keys [key_begin, key_end) of one
// (batch, key head). For dq the keys are all keys; for dk and dv the rows are all rows of all heads that read the key
// head. In a ragged or windowed batch each sequence has its own parameters, in which it is a batch of one.
struct BackwardTask {
  const attention::BackwardParams* params;
  ScalarType type;
  bool causal;
  bool with_dq;
  bool with_dkv;
  bool is_exact;  // compute a whole (batch, key head) in double
  int32_t batch;
  int32_t head_kv;
  int32_t head_begin;
  int32_t head_end;
  int32_t row_begin;  // a multiple of kBackwardRows
  int32_t row_end;
  int32_t key_begin;  // a multiple of kBackwardKeys
  int32_t key_end;
  int32_t head_dim_v;
  int64_t lse_stride;                 // between heads
  bool has_options;                   // use params' score options instead of `causal`
  const attention::Dropout* dropout;  // null: none; otherwise has_options is set
  int32_t sequence;                   // index in the batch, whatever `batch` is
};

// Block size: three score matrices of a block and its operands with head_dim 128 take half of a 1 MiB L2 cache.
constexpr int32_t kBackwardRows = 64;
constexpr int32_t kBackwardKeys = 128;

// Problems to compute in double (backward_exact.h), by the number of scores per key head over all query heads that read
// it: always below kExactScores; up to kMostExactScores if a row's keys span more than one block, or if a log-sum-exp
// is large, because then its rounding and that of the scores matter. In larger problems errors average out.
constexpr int64_t kExactScores = int64_t{1} << 14;
constexpr int64_t kMostExactScores = int64_t{1} << 17;
constexpr int64_t kMostExactRows = 1024;
constexpr float kLargeLse = 16.0f;

// One instruction set's implementation. Products and sums are computed block by block, in ascending order: no result
// depends on how the work is divided into tasks.
struct BackwardKernel {
  // Bytes of scratch memory, 64-byte aligned.
  size_t (*scratch_bytes)(const BackwardTask& task);
  void (*run)(const BackwardTask& task, void* scratch);
};

extern const BackwardKernel kBackwardBaselineKernel;
extern const BackwardKernel kBackwardAvx2Kernel;
extern const BackwardKernel kBackwardAvx512Kernel;
extern const BackwardKernel kBackwardAvx512Bf16Kernel;

}  // namespace flashmoe::cpu
