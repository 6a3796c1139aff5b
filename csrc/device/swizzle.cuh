// The layout of a [rows, head_dim] tile of 16-bit elements in shared memory.
//
// A row is head_dim / 8 chunks of 16 bytes, stored one after another; within each group of eight chunks (64 columns,
// 128 bytes, all banks once) chunk c of row r is at position c ^ (r % 8). Eight consecutive rows of one column chunk,
// which ldmatrix reads in one phase, are therefore in eight different groups of four banks.
#pragma once

#include "ptx/memory.cuh"
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

// One lane's walk along the columns of a fixed tile row: chunk = 2 * step + lane_chunk, lane_chunk 0 or 1. The swizzle
// touches three address bits, and a tile row starts at a multiple of 128 bytes, so a step inside 64 columns is an
// exclusive-or of two address bits; 64 columns, or rows that are a multiple of 8 further, are an immediate.
template <int kHeadDim>
struct ColumnWalk {
  ptx::SmemPointer start_smem;

  __device__ __forceinline__ ColumnWalk(ptx::SmemPointer tile_smem, int offset) : start_smem(tile_smem + offset) {}

  // Address 16 * step columns and 16 * row_block rows further.
  __device__ __forceinline__ ptx::SmemPointer at(int step, int row_block) const {
    return (start_smem ^ (step % 4 * (2 * kChunkBytes))) +
           (step / 4 * (kSegmentChunks * kChunkBytes) + row_block * 16 * (kHeadDim * 2));
  }
};

}  // namespace flashmoe
