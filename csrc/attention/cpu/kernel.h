// What the dispatcher and the per-instruction-set translation units share. Plain data and declarations only: an inline
// function here would be compiled once with AVX-512 and once without, and the linker would keep either one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/dropout.h"
#include "cpu/scalar_types.h"

namespace flashmoe::cpu {

// Rows [row_begin, row_end) of one (batch, query head). Of a ragged or paged batch each entry has parameters of its own, in which
// it is a batch of one.
struct Task {
  const attention::ForwardParams* params;
  ScalarType type;
  bool causal;
  int32_t batch;
  int32_t head_q;
  int32_t row_begin;  // a multiple of Kernel::row_granularity
  int32_t row_end;
  int32_t head_dim_v;
  int64_t lse_stride;                 // from head to head
  bool is_band;                       // params' band and pages count, instead of `causal`
  const attention::Dropout* dropout;  // null: none; else is_band
  int32_t sequence;                   // of the batch, whatever `batch` is
};

// One instruction set's implementation.
struct Kernel {
  // A row's result depends on the keys it sees and on its position inside its block of this many rows, never on
  // which other blocks are in the task: so the dispatcher may choose any multiple as the task's height.
  int32_t row_granularity;
  // Bytes of scratch memory that a task of `rows` rows needs, 64-byte aligned; head_dim is the larger of the two.
  size_t (*scratch_bytes)(ScalarType type, int32_t head_dim, int32_t rows);
  void (*run)(const Task& task, void* scratch);
};

extern const Kernel kBaselineKernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kAmxKernel;

}  // namespace flashmoe::cpu
