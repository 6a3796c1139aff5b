// Maps tile numbers to experts and tiles. There is no list of tiles in memory: a warp walks over the experts, one per
// lane, because a block's tile numbers only increase.
//
// Tile numbers run over the experts in order; within an expert over groups of row tiles; within a group over the column
// tiles and, innermost, over the group's row tiles. So blocks that run at the same time share the weights of a few
// column tiles and the rows of a group, and both stay in L2.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/rows.cuh"
#include "moe/params/gemm.h"
#include "moe/prefix_sum.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

// Rows first_row to end_row - 1 belong to the expert; the tile may reach past them. expert < 0: no more work.
struct Tile {
  int expert;
  int first_row;
  int end_row;  // of the expert
  int n_block;
};

// Number of tiles of kBlockM rows over all experts. Called by a whole warp.
template <int kBlockM>
__device__ __forceinline__ int count_row_tiles(const GemmParams& params) {
  uint32_t tiles = 0;
#pragma unroll 4
  for (int expert = ptx::lane_index(); expert < params.experts; expert += 32) {
    const int rows = first_row_of(params, expert + 1) - first_row_of(params, expert);
    tiles += ceil_div(rows, kBlockM);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) tiles += ptx::shuffle_xor(tiles, lanes);
  return static_cast<int>(tiles);
}

// 32 experts, one per lane; none before the first seek.
template <int kBlockM>
struct ExpertWindow {
  static constexpr int kGroupTiles = 2048 / kBlockM;

  int end_tile = 0;  // row tiles of the experts up to the window's last
  int before = 0;    // row tiles of the experts before this lane's
  int tiles = 0;     // of this lane's expert
  int expert;        // this lane's
  int first_row = 0;
  int end_row = 0;

  __device__ __forceinline__ ExpertWindow() : expert(ptx::lane_index() - 32) {}

  // Moves on to the next 32 experts.
  __device__ __forceinline__ void advance(const GemmParams& params) {
    expert += 32;
    first_row = end_row = 0;
    if (expert < params.experts) {
      first_row = first_row_of(params, expert);
      end_row = first_row_of(params, expert + 1);
    }
    tiles = ceil_div(end_row - first_row, kBlockM);
    const int through = warp_inclusive_sum(tiles);  // tiles of the lanes up to this one
    before = end_tile + through - tiles;
    end_tile += ptx::shuffle_index(through, 31);
  }

  // Moves on to the experts of tile `tile_index`, which must exist, and returns whether it belongs to this lane's expert.
  // Called by a whole warp.
  __device__ __forceinline__ bool seek(const GemmParams& params, int n_blocks, int tile_index) {
    const int row_tile = tile_index / n_blocks;
    while (row_tile >= end_tile) advance(params);
    return row_tile >= before && row_tile < before + tiles;
  }

  // Tile `tile_index` of the schedule, which must belong to this lane's expert.
  __device__ __forceinline__ Tile tile(int n_blocks, int tile_index) const {
    const int in_expert = tile_index - before * n_blocks;
    const int first_tile = in_expert / (kGroupTiles * n_blocks) * kGroupTiles;
    const int group_tiles = minimum(kGroupTiles, tiles - first_tile);
    const int in_group = in_expert - first_tile * n_blocks;
    const int n_block = in_group / group_tiles;
    const int row_tile = first_tile + in_group - n_block * group_tiles;
    return Tile{expert, first_row + row_tile * kBlockM, end_row, n_block};
  }
};

}  // namespace flashmoe::moe
