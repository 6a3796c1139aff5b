// Operand tiles in shared memory, 16-bit elements in chunks of 16 bytes, and how a warp reads its fragments from them.
//
// Along k (kMn false):  [rows, kBlockK = 32], 64 bytes per row; chunk c of row r is stored at c ^ (r / 2 % 4), so that
// the
//                       eight rows of an ldmatrix phase fall on eight different groups of four banks.
// Across k (kMn true):  [kBlockK, columns], the layout of device/swizzle.cuh; read with .trans.
#pragma once

#include "device/swizzle.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::mma_sync {

constexpr int kBlockK = 32;
constexpr int kSteps = kBlockK / 16;                  // 16-k products per tile
constexpr int kRowChunks = kBlockK / kChunkElements;  // per row along k
constexpr int kRowBytes = kRowChunks * kChunkBytes;

__device__ __forceinline__ constexpr int row_offset(int row, int chunk) {
  return row * kRowBytes + (chunk ^ (row / 2 % kRowChunks)) * kChunkBytes;
}

enum class Side { kA, kB };

// A lane's addresses in an operand's tile of kExtent rows of A or columns of B. ldmatrix.x4 loads 16 of them by 16 of
// k, its four matrices in the order that mma expects: for A, (first 8, k 0-7), (last 8, k 0-7), (first 8, k 8-15),
// (last 8, k 8-15); for B, both k halves of the first 8, then of the last 8.
template <Side kSide, bool kMn, int kExtent>
struct FragmentWalk {
  int start;  // bytes from the tile's start

  __device__ __forceinline__ explicit FragmentWalk(int warp_first) {
    const int lane = ptx::lane_index();
    constexpr bool kRowsFirst = (kSide == Side::kA) != kMn;
    const int row = kRowsFirst ? lane % 16 : lane % 8 + lane / 16 * 8;
    const int chunk = kRowsFirst ? lane / 16 : lane / 8 % 2;
    start =
        kMn ? swizzled_offset<kExtent>(row, warp_first / kChunkElements + chunk) : row_offset(warp_first + row, chunk);
  }

  // Loads rows or columns 16 * block to 16 * block + 15 of the warp at k step `step`. A tile must start at a multiple
  // of 128 bytes.
  __device__ __forceinline__ void load(uint32_t (&r)[4], ptx::SmemPointer tile_smem, int block, int step) const {
    if constexpr (kMn) {
      const ptx::SmemPointer row_smem = (tile_smem + start) ^ (block % 4 * (2 * kChunkBytes));
      ptx::ldmatrix_x4_trans(r, row_smem + (block / 4 * (kSegmentChunks * kChunkBytes) + step * 16 * kExtent * 2));
    } else {
      ptx::ldmatrix_x4(r, ((tile_smem + start) ^ (step * (2 * kChunkBytes))) + block * 16 * kRowBytes);
    }
  }
};

}  // namespace flashmoe::moe::mma_sync
