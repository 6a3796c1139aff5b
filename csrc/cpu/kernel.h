// What the dispatcher and the per-instruction-set translation units share. Plain data and declarations only: an inline
// function here would be compiled once with AVX-512 and once without, and the linker would keep either one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/params/forward.h"
#include "attention.h"

namespace flashmoe {
namespace cpu {

// Rows [row_begin, row_end) of one (batch, query head).
struct Task {
  const attention::ForwardParams* params;
  ScalarType type;
  bool causal;
  int32_t batch;
  int32_t head_q;
  int32_t row_begin;  // a multiple of Kernel::row_granularity
  int32_t row_end;
};

// A worker's tasks. Writes the next one to *task and returns true until none is left.
struct TaskSource {
  bool (*take)(void* context, Task* task);
  void* context;
};

// One instruction set's implementation.
struct Kernel {
  const char* name;
  // A row's result depends on the keys it sees and on its position inside its group of this many rows, never on
  // which other groups are in the task: so the dispatcher may choose any multiple as the task's height.
  int32_t row_granularity;
  // Bytes of scratch memory that a task of `rows` rows needs, 64-byte aligned.
  size_t (*scratch_bytes)(ScalarType type, int32_t head_dim, int32_t rows);
  // Runs tasks until none is left.
  void (*run)(const TaskSource& tasks, void* scratch);
};

extern const Kernel kBaselineKernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
extern const Kernel kAmxKernel;

}  // namespace cpu
}  // namespace flashmoe
