// The tiles of a grouped product, which only the device can count: experts in order; within an expert, groups of
// kGroupTiles row tiles; within a group, the column tiles, with the group's row tiles innermost, so that concurrent
// blocks share both operands in L2.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/rows.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::mma_sync {

constexpr int kGroupTiles = 16;

// One tile: rows `row` to row + rows - 1 (those of the tile's kBlockM that belong to the expert), and column tile
// column_tile.
struct Tile {
  int expert;
  int row;
  int rows;
  int column_tile;
};

// The coordinates of tile `index` among row_tiles * column_tiles of one expert.
__device__ __forceinline__ void locate_in_expert(int index, int row_tiles, int column_tiles, int& row_tile,
                                                 int& column_tile) {
  const int group = index / (kGroupTiles * column_tiles);
  const int within = index - group * (kGroupTiles * column_tiles);
  const int size = minimum(kGroupTiles, row_tiles - group * kGroupTiles);
  column_tile = within / size;
  row_tile = group * kGroupTiles + within - column_tile * size;
}

// Finds row tiles with a table in shared memory: the number of row tiles before each of kRuns runs of experts. 64 words
// instead of one per expert, so that two blocks with three stages fit in the 100 KiB of sm_86; the walk within a run is
// short.
template <int kBlockM>
class RowTiles {
 public:
  static constexpr int kRuns = 64;
  static constexpr int kSharedBytes = (kRuns + 1) * 4;

  // Called by every thread of the block; there are at least kRuns of them.
  __device__ __forceinline__ RowTiles(const GemmParams& params, ptx::SmemPointer table_smem)
      : params_(params), table_smem_(table_smem), run_experts_(ceil_div(params.experts, kRuns)) {
    const int thread = ptx::thread_index();
    if (thread < kRuns) {
      int tiles = 0;
      for (int expert = thread * run_experts_; expert < (thread + 1) * run_experts_; ++expert)
        tiles += expert < params.experts ? tiles_of(expert) : 0;
      ptx::st_shared_32(table_smem + thread * 4, tiles);
    }
    ptx::barrier_sync_block();  // every run is counted
    int before = 0;
    if (thread <= kRuns)
      for (int run = 0; run < thread; ++run) before += static_cast<int>(ptx::ld_shared_32(table_smem + run * 4));
    ptx::barrier_sync_block();  // counts have been read; sums replace them
    if (thread <= kRuns) ptx::st_shared_32(table_smem + thread * 4, before);
    ptx::barrier_sync_block();  // sums are written
  }

  __device__ __forceinline__ int count() const { return before(kRuns); }

  __device__ __forceinline__ Tile locate(int index, int column_tiles) const {
    int run = 0;
#pragma unroll
    for (int width = kRuns / 2; width > 0; width /= 2)
      if (before(run + width) * column_tiles <= index) run += width;
    index -= before(run) * column_tiles;
    Tile tile;
    tile.expert = run * run_experts_;
    int tiles = tiles_of(tile.expert);
    while (index >= tiles * column_tiles) {
      index -= tiles * column_tiles;
      tiles = tiles_of(++tile.expert);
    }
    int row_tile;
    locate_in_expert(index, tiles, column_tiles, row_tile, tile.column_tile);
    tile.row = offset(tile.expert) + row_tile * kBlockM;
    tile.rows = minimum(kBlockM, offset(tile.expert + 1) - tile.row);
    return tile;
  }

 private:
  __device__ __forceinline__ int offset(int expert) const { return first_row_of(params_, expert); }
  __device__ __forceinline__ int tiles_of(int expert) const {
    return ceil_div(offset(expert + 1) - offset(expert), kBlockM);
  }
  __device__ __forceinline__ int before(int run) const {
    return static_cast<int>(ptx::ld_shared_32(table_smem_ + run * 4));
  }

  const GemmParams& params_;
  ptx::SmemPointer table_smem_;
  int run_experts_;
};

}  // namespace flashmoe::moe::mma_sync
