// For the fused backward kernel: the range of query blocks that each tile of 128 keys sees of a bool mask, and the
// tile's rank in the ordered sums of dq of these blocks. Tiles add in descending order (fused.cuh), so a tile's rank in
// a block is the number of later tiles whose range includes the block. A tile adds to every block of its range, also to
// those that its mask hides as a whole, so ranges, not blocks, determine ranks.
// Grid: a thread block per matrix and tile, matrices first.
#pragma once

#include "attention/params/bool_mask.h"
#include "device/math.cuh"
#include "ptx/barrier.cuh"
#include "ptx/elements.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention {

template <typename Element, int kNumWarps_>
struct BoolMaskTilesSpec {
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kSharedBytes = 8 * kMaxMaskTiles;  // a range per tile
};

// Whether a row of the block sees a key of the tile.
__device__ __forceinline__ bool sees_tile(const VisibleBlocks& blocks, int matrix, int block, int tile) {
  constexpr int kTileBlocks = kMaskTileKeys / kMaskBlock;
  constexpr int kWordTiles = kMaskWordBlocks / kTileBlocks;
  const int row = matrix * blocks.row_blocks + block;
  const uint32_t word = ptx::ld_global_32(blocks.words + row * blocks.key_words + tile / kWordTiles);
  return (word >> tile % kWordTiles * (8 * kTileBlocks) & 0xffff) != 0;
}

template <typename Spec>
__device__ __forceinline__ void bool_mask_tiles(const BoolMaskTilesParams& params) {
  const VisibleBlocks& blocks = params.blocks;
  const int matrix = ptx::block_index() / params.tiles;
  const int own_tile = ptx::block_index() - matrix * params.tiles;
  unsigned char* ranges = ptx::dynamic_shared_memory();
  for (int tile = own_tile + ptx::thread_index(); tile < params.tiles; tile += Spec::kNumThreads) {
    int begin = 0, end = blocks.row_blocks;
    while (begin < end && !sees_tile(blocks, matrix, begin, tile)) ++begin;
    while (begin < end && !sees_tile(blocks, matrix, end - 1, tile)) --end;
    const uint32_t range[2] = {static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
    ptx::st_shared_64(ranges + 8 * tile, range);
    if (tile == own_tile) ptx::st_global_64(params.ranges + 2 * (matrix * params.tiles + tile), range);
  }
  // Hazard: ranges are read before their threads have written them.
  ptx::barrier_sync_block();
  int32_t* ranks_gmem = params.ranks + (matrix * params.tiles + own_tile) * blocks.row_blocks;
  for (int block = ptx::thread_index(); block < blocks.row_blocks; block += Spec::kNumThreads) {
    int rank = 0;
    for (int tile = own_tile + 1; tile < params.tiles; ++tile) {
      uint32_t range[2];
      ptx::ld_shared_64(range, ranges + 8 * tile);
      rank += block >= static_cast<int>(range[0]) && block < static_cast<int>(range[1]);
    }
    ptx::st_global_32(ranks_gmem + block, rank);
  }
}

}  // namespace flashmoe::attention
