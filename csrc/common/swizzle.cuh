// The layout of a [rows, head_dim] tile of 16-bit elements in shared memory.
//
// A row is head_dim / 8 chunks of 16 bytes, stored one after another; within each group of eight chunks (64 columns,
// 128 bytes, all banks once) chunk c of row r lies at position c ^ (r % 8). Eight consecutive rows of one column chunk,
// which is what ldmatrix reads in one phase, so fall on eight different groups of four banks.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {

constexpr int kChunkElements = 8;  // 16 bytes
constexpr int kChunkBytes = 16;
constexpr int kSegmentChunks = 8;  // the swizzle permutes within 64 columns

// Byte offset of (row, chunk) in a tile whose rows are kHeadDim elements long.
template <int kHeadDim>
__device__ __forceinline__ constexpr int swizzled_offset(int row, int chunk) {
  return row * (kHeadDim * 2) + (chunk ^ (row % kSegmentChunks)) * kChunkBytes;
}

// Offsets of one lane for a walk along the columns: chunk = 2 * step + lane_chunk (lane_chunk 0 or 1) of a fixed row.
// The swizzle only touches three bits of the chunk, so four registers serve any head dim and every tile row that is a
// multiple of 8 further down: the rest of an address is an immediate.
template <int kHeadDim>
struct ColumnWalk {
  int offset[4];

  __device__ __forceinline__ ColumnWalk(int row, int lane_chunk) {
#pragma unroll
    for (int step = 0; step < 4; ++step) offset[step] = swizzled_offset<kHeadDim>(row, 2 * step + lane_chunk);
  }

  // Byte offset at 16 columns times `step`, `row_blocks_16` blocks of 16 rows further down.
  __device__ __forceinline__ int at(int step, int row_blocks_16) const {
    return offset[step % 4] + (step / 4) * (kSegmentChunks * kChunkBytes) + row_blocks_16 * 16 * (kHeadDim * 2);
  }
};

}  // namespace flashmoe
