// What the dispatcher of the backward pass and the per-instruction-set translation units share. Plain data and
// declarations only: see kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"

namespace flashmoe::cpu {

// Query rows [row_begin, row_end) of query heads [head_begin, head_end) against keys [key_begin, key_end) of one (batch,
// key head). With dq the keys are all keys; with dk and dv the rows are all rows of all heads that read the key head. Of a
// ragged or banded batch each entry has parameters of its own, in which it is a batch of one.
struct BackwardTask {
  const attention::BackwardParams* params;
  ScalarType type;
  bool causal;
  bool with_dq;
  bool with_dkv;
  bool is_exact;  // in double, a whole (batch, key head)
  int32_t batch;
  int32_t head_kv;
  int32_t head_begin;
  int32_t head_end;
  int32_t row_begin;  // a multiple of kBackwardRows
  int32_t row_end;
  int32_t key_begin;  // a multiple of kBackwardKeys
  int32_t key_end;
  int32_t head_dim_v;
  int64_t lse_stride;                 // from head to head
  bool is_band;                       // params' band counts, instead of `causal`
  const attention::Dropout* dropout;  // null: none; else is_band
  int32_t sequence;                   // of the batch, whatever `batch` is
};

// A block: three of its matrices of scores and the operands of head_dim 128 take half of a 1 MiB L2 cache.
constexpr int32_t kBackwardRows = 64;
constexpr int32_t kBackwardKeys = 128;

// Scores of a key head, of all the query heads that read it, that are computed in double (backward_exact.h): below kExactScores
// always, up to kMostExactScores where a row's keys are more than one block, or a log-sum-exp is large, whose rounding and the
// scores' count then. Of larger problems errors average out.
constexpr int64_t kExactScores = int64_t{1} << 14;
constexpr int64_t kMostExactScores = int64_t{1} << 17;
constexpr int64_t kMostExactRows = 1024;
constexpr float kLargeLse = 16.0f;

// One instruction set's implementation. Products and sums are those of blocks, in ascending order: no result depends on
// how the work is cut into tasks.
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
