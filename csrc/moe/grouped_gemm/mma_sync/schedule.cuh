// Tiles of a grouped product, which only the device can count: experts in order, of each its row tiles in groups of
// kGroupTiles, of each group the column tiles, and the rows of the group innermost: blocks that run at a time share both operands in L2.
#pragma once

#include "device/math.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace moe {
namespace mma_sync {

constexpr int kGroupTiles = 16;

// One tile: rows `row` to row + rows - 1 (of the tile's kBlockM, those that count), and the columns of number column_tile.
struct Tile {
  int expert;
  int row;
  int rows;
  int column_tile;
};

// The place of tile `index` among row_tiles * column_tiles of one expert.
__device__ __forceinline__ void place_in_expert(int index, int row_tiles, int column_tiles, int& row_tile,
                                                int& column_tile) {
  const int group = index / (kGroupTiles * column_tiles);
  const int within = index - group * (kGroupTiles * column_tiles);
  const int size = minimum(kGroupTiles, row_tiles - group * kGroupTiles);
  column_tile = within / size;
  row_tile = group * kGroupTiles + within - column_tile * size;
}

// Finds row tiles by a table in shared memory: how many there are before each of kParts runs of experts. 64 words instead of one
// an expert, so that two blocks with three stages fit the 100 KiB of sm_86; the walk inside a run is short.
template <int kBlockM>
class RowTiles {
 public:
  static constexpr int kParts = 64;
  static constexpr int kSharedBytes = (kParts + 1) * 4;

  // Every thread of the block calls it; there are at least kParts of them.
  __device__ __forceinline__ RowTiles(const GemmParams& params, ptx::SmemPointer table_smem)
      : params_(params), table_smem_(table_smem), part_experts_(ceil_div(params.experts, kParts)) {
    const int thread = ptx::thread_index();
    if (thread < kParts) {
      int tiles = 0;
      for (int expert = thread * part_experts_; expert < (thread + 1) * part_experts_; ++expert)
        tiles += expert < params.experts ? tiles_of(expert) : 0;
      ptx::st_shared_32(table_smem + thread * 4, tiles);
    }
    ptx::barrier_sync_block();  // every run is counted
    int before = 0;
    if (thread <= kParts)
      for (int part = 0; part < thread; ++part) before += static_cast<int>(ptx::ld_shared_32(table_smem + part * 4));
    ptx::barrier_sync_block();  // counts have been read, sums take their place
    if (thread <= kParts) ptx::st_shared_32(table_smem + thread * 4, before);
    ptx::barrier_sync_block();  // sums are there
  }

  __device__ __forceinline__ int count() const { return before(kParts); }

  __device__ __forceinline__ Tile locate(int index, int column_tiles) const {
    int part = 0;
#pragma unroll
    for (int width = kParts / 2; width > 0; width /= 2)
      if (before(part + width) * column_tiles <= index) part += width;
    index -= before(part) * column_tiles;
    Tile tile;
    tile.expert = part * part_experts_;
    int tiles = tiles_of(tile.expert);
    while (index >= tiles * column_tiles) {
      index -= tiles * column_tiles;
      tiles = tiles_of(++tile.expert);
    }
    int row_tile;
    place_in_expert(index, tiles, column_tiles, row_tile, tile.column_tile);
    tile.row = offset(tile.expert) + row_tile * kBlockM;
    tile.rows = minimum(kBlockM, offset(tile.expert + 1) - tile.row);
    return tile;
  }

 private:
  __device__ __forceinline__ int offset(int expert) const {
    return static_cast<int>(ptx::ld_global_32(params_.expert_offsets + expert));
  }
  __device__ __forceinline__ int tiles_of(int expert) const {
    return ceil_div(offset(expert + 1) - offset(expert), kBlockM);
  }
  __device__ __forceinline__ int before(int part) const {
    return static_cast<int>(ptx::ld_shared_32(table_smem_ + part * 4));
  }

  const GemmParams& params_;
  ptx::SmemPointer table_smem_;
  int part_experts_;
};

}  // namespace mma_sync
}  // namespace moe
}  // namespace flashmoe
