// The two functions of a Kernel table entry, for instruction sets that have only vectors. Include after a vector_*.h.
// Internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention/cpu/forward_few_rows.h"
#include "attention/cpu/forward_simd.h"

namespace flashmoe::cpu {
namespace {

template <class T>
inline void run_simd_as(const Task& task, void* scratch) {
  return has_few_rows(*task.params) && task.dropout == nullptr ? forward_few_rows<T>(task, scratch)
                                                               : forward_simd<T>(task, scratch);
}

inline void run_simd(const Task& task, void* scratch) {
  switch (task.type) {
    case ScalarType::kFloat32:
      return run_simd_as<float>(task, scratch);
    case ScalarType::kFloat16:
      return run_simd_as<Half>(task, scratch);
    case ScalarType::kBFloat16:
      return run_simd_as<BFloat16>(task, scratch);
  }
}

inline size_t simd_scratch_bytes(ScalarType, int32_t head_dim, int32_t rows) {
  const int32_t padded_dim = round_up(head_dim, Vector::kWidth);
  const size_t few_rows_bytes = FewRowsScratch(nullptr, padded_dim).bytes;
  const size_t bytes = SimdScratch(nullptr, row_block_count(rows), padded_dim).bytes;
  return bytes > few_rows_bytes ? bytes : few_rows_bytes;
}

}  // namespace
}  // namespace flashmoe::cpu
