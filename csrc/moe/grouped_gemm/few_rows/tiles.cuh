// The tiles of a launch. Only the device knows how many rows each expert has, so every block starts by counting the row
// tiles before each expert. Tile numbers run over the experts in order and, within an expert, over its row tiles first:
// tiles that share weights run side by side, so the weights are read from memory once and otherwise from L2.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/rows.cuh"
#include "moe/params/gemm.h"
#include "ptx/atomics.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::few_rows {

struct Tile {
  int expert;
  int row;     // first row
  int rows;    // 1 to kBlockM
  int column;  // first weight row: of z, if there are gate and up
};

// The inclusive prefix sum over the lanes.
__device__ __forceinline__ int warp_prefix_sum(int value) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = ptx::shuffle_index(value, (lane - distance) & 31);
    if (lane >= distance) value += before;
  }
  return value;
}

// Counts the rows of each expert in params.ids, to list_smem. Called by all threads; ends with a barrier.
template <typename Spec>
__device__ __forceinline__ void count_ids(const GemmParams& params, ptx::SmemPointer list_smem) {
  constexpr int kLoads = 8;  // in flight
  const int thread = ptx::thread_index();
  for (int expert = thread; expert < params.experts; expert += Spec::kNumThreads)
    ptx::st_shared_32(list_smem + 4 * expert, 0);
  ptx::barrier_sync_block();  // zeros before counts
  for (int start = thread; start < params.slots; start += kLoads * Spec::kNumThreads) {
    uint32_t id[kLoads][2];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int slot = start + i * Spec::kNumThreads;
      id[i][0] = id[i][1] = 0xffffffffu;
      if (slot >= params.slots) continue;
      if (params.id_bytes == 8) {
        ptx::ld_global_64(id[i], static_cast<const int64_t*>(params.ids) + slot);
      } else {
        id[i][0] = ptx::ld_global_32(static_cast<const int32_t*>(params.ids) + slot);
        id[i][1] = 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (id[i][1] == 0 && id[i][0] < static_cast<uint32_t>(params.experts))
        ptx::atomic_add_shared(list_smem + 4 * static_cast<int>(id[i][0]), 1);
  }
  ptx::barrier_sync_block();  // all ids are counted
}

// Counts rows by params.ids if given, which can be read before the sort has ended, else by its offsets.
template <typename Spec>
struct TileList {
  const GemmParams& params;
  const ptx::SmemPointer list_smem;  // [experts]: row tiles before each expert
  const int column_tiles;
  int count;

  // Called by all threads; list_smem: kListBytes, warp_counts_smem: one word per warp.
  __device__ __forceinline__ TileList(const GemmParams& params_, ptx::SmemPointer list,
                                      ptx::SmemPointer warp_counts_smem)
      : params(params_), list_smem(list), column_tiles(ceil_div(params_.n, Spec::kBlockN)) {
    if (params.expert_offsets == nullptr) {  // one matrix: nothing to look up
      count = ceil_div(params.slots, Spec::kBlockM) * column_tiles;
      return;
    }
    constexpr int kThreadExperts =
        (Spec::kMaxExperts + Spec::kNumThreads - 1) / Spec::kNumThreads;  // per thread, neighbours
    const int experts = ceil_div(params.experts, Spec::kNumThreads);
    const int first = ptx::thread_index() * experts;
    int tiles[kThreadExperts + 1];
    const bool counts_ids = params.ids != nullptr;
    if (counts_ids) count_ids<Spec>(params, list_smem);
#pragma unroll
    for (int i = 0; i <= kThreadExperts; ++i)  // all loads are in flight together
      tiles[i] = !counts_ids && i <= experts && first + i <= params.experts ? load_offset(first + i) : 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kThreadExperts; ++i) {
      const bool valid = i < experts && first + i < params.experts;
      int rows = tiles[i + 1] - tiles[i];
      if (counts_ids && valid) rows = static_cast<int>(ptx::ld_shared_32(list_smem + 4 * (first + i)));
      tiles[i] = valid ? ceil_div(rows, Spec::kBlockM) : 0;
      sum += tiles[i];
    }
    const int inclusive = warp_prefix_sum(sum);
    if (ptx::lane_index() == 31) ptx::st_shared_32(warp_counts_smem + 4 * ptx::warp_index(), inclusive);
    ptx::barrier_sync_block();  // every warp's sum is written
    int before = inclusive - sum;
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) {
      const int of_warp = ptx::ld_shared_32(warp_counts_smem + 4 * warp);
      if (warp < ptx::warp_index()) before += of_warp;
      total += of_warp;
    }
#pragma unroll
    for (int i = 0; i < kThreadExperts; ++i) {
      if (i < experts && first + i < params.experts) ptx::st_shared_32(list_smem + 4 * (first + i), before);
      before += tiles[i];
    }
    count = total * column_tiles;
    ptx::barrier_sync_block();  // the list is complete
  }

  __device__ __forceinline__ int load_offset(int expert) const { return first_row_of(params, expert); }

  __device__ __forceinline__ int first_of(int expert) const {
    return static_cast<int>(ptx::ld_shared_32(list_smem + 4 * expert)) * column_tiles;
  }

  // The expert of a tile: the last one whose first tile is not past it, so one with rows.
  __device__ __forceinline__ int expert_of(int tile_index) const {
    int expert = 0;
#pragma unroll
    for (int step = Spec::kMaxExperts / 2; step > 0; step /= 2)
      if (expert + step < params.experts && first_of(expert + step) <= tile_index) expert += step;
    return expert;
  }

  // The weights of a tile, without its rows, which need the sort.
  __device__ __forceinline__ Tile find_weights(int tile_index) const {
    const int expert = expert_of(tile_index);
    const int end = expert + 1 < params.experts ? first_of(expert + 1) : count;
    const int row_tiles = (end - first_of(expert)) / column_tiles;
    return Tile{expert, 0, 0, (tile_index - first_of(expert)) / row_tiles * Spec::kBlockN};
  }

  // tile_index: 0 to count - 1.
  __device__ __forceinline__ Tile find(int tile_index) const {
    if (params.expert_offsets == nullptr) {
      const int row_tiles = ceil_div(params.slots, Spec::kBlockM);
      const int column_tile = tile_index / row_tiles;
      const int row = (tile_index - column_tile * row_tiles) * Spec::kBlockM;
      return Tile{0, row, minimum(params.slots - row, Spec::kBlockM), column_tile * Spec::kBlockN};
    }
    const int expert = expert_of(tile_index);
    const int begin = load_offset(expert);
    const int end = load_offset(expert + 1);
    const int row_tiles = ceil_div(end - begin, Spec::kBlockM);
    const int local = tile_index - first_of(expert);
    const int column_tile = local / row_tiles;
    const int row = begin + (local - column_tile * row_tiles) * Spec::kBlockM;
    return Tile{expert, row, minimum(end - row, Spec::kBlockM), column_tile * Spec::kBlockN};
  }
};

}  // namespace flashmoe::moe::few_rows
