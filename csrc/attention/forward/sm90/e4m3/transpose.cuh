// Transposes V of 8-bit floats for the products of consumer.cuh: [keys, columns] becomes blocks of 128 keys,
// [columns, 128] each.
//
// Each 32 keys are in the order in which a thread holds them in an accumulator, so that P needs no shuffle: position
// 16h + 4t + 2u + c holds key 16h + 8u + 2t + c (h, u, c below 2, t below 4). Keys and columns past the end are zeros,
// because P = 0 times NaN is NaN.
//
// A thread transposes 32 keys of four columns in registers. Grid: one thread for each of these, columns fastest, then
// keys, heads, batch. With ragged keys the blocks are sequence by sequence (first_value_block), and a thread searches
// for the sequence of its block.
#pragma once

#include "attention/forward/sm90/e4m3/spec.cuh"
#include "attention/params/e4m3.h"
#include "attention/sequences.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/permute.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm90 {

template <typename Element_, int kNumWarps_>
struct TransposeSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
};

// rows[i] byte j becomes columns[j] byte i.
__device__ __forceinline__ void transpose_bytes(uint32_t (&columns)[4], const uint32_t (&rows)[4]) {
  const uint32_t low[2] = {ptx::permute_bytes(rows[0], rows[1], 0x5140), ptx::permute_bytes(rows[2], rows[3], 0x5140)};
  const uint32_t high[2] = {ptx::permute_bytes(rows[0], rows[1], 0x7362), ptx::permute_bytes(rows[2], rows[3], 0x7362)};
  columns[0] = ptx::permute_bytes(low[0], low[1], 0x5410);
  columns[1] = ptx::permute_bytes(low[0], low[1], 0x7632);
  columns[2] = ptx::permute_bytes(high[0], high[1], 0x5410);
  columns[3] = ptx::permute_bytes(high[0], high[1], 0x7632);
}

// Returns the sequence that block `block` of transposed V belongs to: the last one that begins no later.
__device__ __forceinline__ int sequence_of_block(const TransposeParams& params, int block) {
  int sequence = 0;
  int end = params.batch;
  while (end - sequence > 1) {
    const int middle = (sequence + end) / 2;
    const bool is_later = first_value_block(key_extent(params, middle).first, middle) > block;
    (is_later ? end : sequence) = middle;
  }
  return sequence;
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
  int first_key = static_cast<int>(rest % groups) * kKeys;  // of the sequence
  const int64_t all_heads = rest / groups;
  const bool is_ragged = params.sequences.cu_seqlens_k != nullptr;
  if (all_heads >= (is_ragged ? int64_t{1} : params.batch) * params.heads_kv) return;
  const int block = first_key / kTransposedKeys;
  const int sequence = is_ragged ? sequence_of_block(params, block) : static_cast<int>(all_heads / params.heads_kv);
  const int head = static_cast<int>(all_heads - (is_ragged ? int64_t{0} : sequence) * params.heads_kv);
  const Extent keys = key_extent(params, sequence);
  // [value_rows, kTransposedKeys] of the block
  unsigned char* out_gmem = static_cast<unsigned char*>(params.out) +
                            ((all_heads * params.value_blocks + block) * params.value_rows + column) * kTransposedKeys +
                            first_key % kTransposedKeys;
  if (is_ragged) first_key -= first_value_block(keys.first, sequence) * kTransposedKeys;
  const unsigned char* v_gmem = static_cast<const unsigned char*>(params.v) + sequence * params.v_stride.batch +
                                head * params.v_stride.head + (keys.first + first_key) * params.v_stride.row + column;
  uint32_t columns[4][kKeys / 4];
#pragma unroll
  for (int word = 0; word < kKeys / 4; ++word) {  // position 4 * word and the next three
    uint32_t rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = word / 4 * 16 + i / 2 * 8 + word % 4 * 2 + i % 2;
      const bool is_there = first_key + key < keys.length && column < params.head_dim_v;
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

}  // namespace flashmoe::attention::sm90
