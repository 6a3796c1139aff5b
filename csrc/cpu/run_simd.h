// The two functions of a Kernel table entry, for the instruction sets that have vectors only. Include after a
// vector_*.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forward_few_rows.h"
#include "forward_simd.h"
#include "kernel.h"

namespace flashmoe {
namespace cpu {
namespace {

void run_simd(const Task& task, void* scratch) {
  if (run_few_rows(task, scratch)) return;
  switch (task.type) {
    case ScalarType::kFloat32:
      return forward_simd<float>(task, scratch);
    case ScalarType::kFloat16:
      return forward_simd<Half>(task, scratch);
    case ScalarType::kBFloat16:
      return forward_simd<BFloat16>(task, scratch);
  }
}

inline void run_simd_tasks(const TaskSource& tasks, void* scratch) {
  Task task;
  while (tasks.take(tasks.context, &task)) run_simd(task, scratch);
}

size_t simd_scratch_bytes(ScalarType, int32_t head_dim, int32_t rows) {
  const size_t bytes = SimdScratch(nullptr, group_count(rows), round_up(head_dim, Vector::kWidth)).bytes;
  const size_t few_rows_bytes = few_rows_scratch_bytes(head_dim);
  return bytes > few_rows_bytes ? bytes : few_rows_bytes;
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
