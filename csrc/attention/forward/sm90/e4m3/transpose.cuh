// V of 8-bit floats, transposed for the products of consumer.cuh: [keys, columns] becomes blocks of 128 keys, [columns, 128] each.
//
// The keys of 32 stand in the order in which a thread of an accumulator has them, so that P needs no shuffle: position 16h + 4t + 2u + c holds
// key 16h + 8u + 2t + c (h, u, c of 2, t of 4). Keys and columns past the end are zeros: P = 0 times NaN is NaN.
//
// A thread transposes 32 keys of four columns in registers. Grid: a thread for each, in this order: columns, keys, heads, batch.
#pragma once

#include "attention/forward/sm90/e4m3/spec.cuh"
#include "attention/params/e4m3.h"
#include "ptx/e4m3.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Element_, int kNumWarps_>
struct TransposeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
};

// rows[i] byte j becomes columns[j] byte i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&columns)[4], const uint32_t (&rows)[4]) {
  const uint32_t low[2] = {ptx::select_bytes(rows[0], rows[1], 0x5140), ptx::select_bytes(rows[2], rows[3], 0x5140)};
  const uint32_t high[2] = {ptx::select_bytes(rows[0], rows[1], 0x7362), ptx::select_bytes(rows[2], rows[3], 0x7362)};
  columns[0] = ptx::select_bytes(low[0], low[1], 0x5410);
  columns[1] = ptx::select_bytes(low[0], low[1], 0x7632);
  columns[2] = ptx::select_bytes(high[0], high[1], 0x5410);
  columns[3] = ptx::select_bytes(high[0], high[1], 0x7632);
}

template <typename Spec>
__device__ __forceinline__ void transpose_values(const TransposeParams& params) {
  ptx::grid_launch_dependents();
  constexpr int kKeys = 32;
  const int words = params.value_rows / 4;
  const int groups = params.value_blocks * (kTransposedKeys / kKeys);
  const int64_t index = static_cast<int64_t>(ptx::block_index()) * Spec::kNumThreads + ptx::thread_index();
  const int column = static_cast<int>(index % words) * 4;
  const int64_t rest = index / words;
  const int first_key = static_cast<int>(rest % groups) * kKeys;
  const int64_t all_heads = rest / groups;
  const int batch = static_cast<int>(all_heads / params.heads_kv);
  if (batch >= params.batch) return;
  const int head = static_cast<int>(all_heads - static_cast<int64_t>(batch) * params.heads_kv);
  const unsigned char* v_gmem = static_cast<const unsigned char*>(params.v) + batch * params.v_stride.batch +
                                head * params.v_stride.head + first_key * params.v_stride.row + column;
  // [value_rows, kTransposedKeys] of the block
  unsigned char* out_gmem =
      static_cast<unsigned char*>(params.out) +
      ((all_heads * params.value_blocks + first_key / kTransposedKeys) * params.value_rows + column) * kTransposedKeys +
      first_key % kTransposedKeys;
  uint32_t columns[4][kKeys / 4];
#pragma unroll
  for (int word = 0; word < kKeys / 4; ++word) {  // position 4 * word and the next three
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = word / 4 * 16 + i / 2 * 8 + word % 4 * 2 + i % 2;
      const bool is_there = first_key + key < params.keys && column < params.head_dim_v;
      rows[i] = is_there ? ptx::ld_global_32(v_gmem + key * params.v_stride.row) : 0;
    }
    uint32_t of_word[4];
    transpose_bytes(of_word, rows);
#pragma unroll
    for (int j = 0; j < 4; ++j) columns[j][word] = of_word[j];
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t chunk[4] = {columns[j][4 * half], columns[j][4 * half + 1], columns[j][4 * half + 2],
                                 columns[j][4 * half + 3]};
      ptx::st_global_128(out_gmem + j * kTransposedKeys + 16 * half, chunk);
    }
  }
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
