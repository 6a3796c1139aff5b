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
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention {

template <typename Element, int kNumWarps_>
struct BoolMaskTilesSpec {
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kSharedBytes = 8 * kMaxMaskTiles;  // a range per tile
};

// Computes the ranges of the word's tiles: a lane reads every 32nd row block. The last word may have a tile past the
// last one, whose range nobody reads.
__device__ __forceinline__ void store_ranges(const BoolMaskTilesParams& params, int matrix, int word, int own_tile,
                                             unsigned char* ranges) {
  constexpr int kTileBlocks = kMaskTileKeys / kMaskBlock;
  constexpr int kWordTiles = kMaskWordBlocks / kTileBlocks;
  static_assert(kMaxMaskTiles % kWordTiles == 0, "shared memory has a range for each tile of the last word");
  const VisibleBlocks& blocks = params.blocks;
  const int32_t* words_gmem = blocks.words + matrix * blocks.row_blocks * blocks.key_words + word;
  uint32_t from_end[kWordTiles] = {};  // row blocks from the first that sees the tile to the last of all
  uint32_t end[kWordTiles] = {};
#pragma unroll 4
  for (int block = ptx::lane_index(); block < blocks.row_blocks; block += 32) {
    const uint32_t seen = ptx::ld_global_32(words_gmem + block * blocks.key_words);
#pragma unroll
    for (int i = 0; i < kWordTiles; ++i) {
      if ((seen >> i * 8 * kTileBlocks & 0xffff) == 0) continue;
      if (end[i] == 0) from_end[i] = blocks.row_blocks - block;
      end[i] = block + 1;
    }
  }
#pragma unroll
  for (int i = 0; i < kWordTiles; ++i) {
    const int tile = word * kWordTiles + i;
    const int begin = blocks.row_blocks - static_cast<int>(ptx::reduce_max(from_end[i]));
    const int after = maximum(begin, static_cast<int>(ptx::reduce_max(end[i])));
    const uint32_t range[2] = {static_cast<uint32_t>(begin), static_cast<uint32_t>(after)};
    if (ptx::lane_index() > 0) continue;
    ptx::st_shared_64(ranges + 8 * tile, range);
    if (tile == own_tile) ptx::st_global_64(params.ranges + 2 * (matrix * params.tiles + tile), range);
  }
}

template <typename Spec>
__device__ __forceinline__ void bool_mask_tiles(const BoolMaskTilesParams& params) {
  const VisibleBlocks& blocks = params.blocks;
  const int matrix = ptx::block_index() / params.tiles;
  const int own_tile = ptx::block_index() - matrix * params.tiles;
  unsigned char* ranges = ptx::dynamic_shared_memory();
  const int own_word = own_tile * kMaskTileKeys / (kMaskBlock * kMaskWordBlocks);
  for (int word = own_word + ptx::warp_index(); word < blocks.key_words; word += Spec::kNumThreads / 32) {
    store_ranges(params, matrix, word, own_tile, ranges);
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
