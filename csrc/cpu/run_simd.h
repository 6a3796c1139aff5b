// The two functions of a Kernel table entry, for the instruction sets that run forward_simd.h alone. Include after a
// vector_*.h. Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "forward_simd.h"
#include "kernel.h"

namespace flashmoe {
namespace cpu {
namespace {

void run_simd(const Task& task, void* scratch) {
  switch (task.type) {
    case ScalarType::kFloat32:
      return forward_simd<float>(task, scratch);
    case ScalarType::kFloat16:
      return forward_simd<Half>(task, scratch);
    case ScalarType::kBFloat16:
      return forward_simd<BFloat16>(task, scratch);
  }
}

size_t simd_scratch_bytes(ScalarType, int32_t head_dim, int32_t rows) {
  return SimdScratch(nullptr, group_count(rows), round_up(head_dim, Vector::kWidth)).bytes;
}

}  // namespace
}  // namespace cpu
}  // namespace flashmoe
