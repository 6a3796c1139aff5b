// Shared by the dispatcher and the translation units of the instruction sets. Plain data and declarations only: an
// inline function here would be compiled both with and without AVX-512, and the linker would keep either copy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"

namespace flashmoe::cpu {

// Rows [row_begin, row_end) of one (batch, query head). In a ragged or paged batch each sequence has its own
// parameters, in which it is a batch of one.
struct Task {
  const attention::ForwardParams* params;
  ScalarType type;
  bool causal;
  int32_t batch;
  int32_t head_q;
  int32_t row_begin;  // a multiple of Kernel::row_granularity
  int32_t row_end;
  int32_t head_dim_v;
  int64_t lse_stride;                 // between heads
  bool has_options;                   // use params' score options and pages instead of `causal`
  const attention::Dropout* dropout;  // null: none; otherwise has_options is set
  int32_t sequence;                   // index in the batch, whatever `batch` is
};

// One instruction set's implementation.
struct Kernel {
  // A row's result depends on the keys it sees and on its position inside its block of this many rows, never on the
  // other blocks of the task: so the dispatcher may choose any multiple as the task's height.
  int32_t row_granularity;
  // Bytes of scratch memory for a task of `rows` rows, 64-byte aligned; head_dim is the larger of the two.
  size_t (*scratch_bytes)(ScalarType type, int32_t head_dim, int32_t rows);
  void (*run)(const Task& task, void* scratch);
};

extern const Kernel kBaselineKernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kAmxKernel;

}  // namespace flashmoe::cpu
