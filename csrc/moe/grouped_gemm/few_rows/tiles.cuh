// The tiles of a launch. Only the device knows how many rows each expert has, so every block counts at its start the tiles of rows
// before each expert; numbers of tiles then go expert by expert, and in an expert over the tiles of rows first: those that share
// weights run side by side and read them from L2 but once from memory.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/rows.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::few_rows {

struct Tile {
  int expert;
  int row;     // the first one
  int rows;    // 1 to kBlockM
  int column;  // the first weight row: of z, where there are gate and up
};

// The sum over the lanes up to this one.
__device__ __forceinline__ int warp_prefix_sum(int value) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int before = ptx::shuffle_index(value, (lane - distance) & 31);
    if (lane >= distance) value += before;
  }
  return value;
}

template <typename Spec>
struct TileList {
  const GemmParams& params;
  const ptx::SmemPointer list_smem;  // [experts]: tiles of rows before each expert
  const int column_tiles;
  int count;

  // All threads; list_smem: kListBytes, words_smem: a word for each warp.
  __device__ __forceinline__ TileList(const GemmParams& params_, ptx::SmemPointer list, ptx::SmemPointer words_smem)
      : params(params_), list_smem(list), column_tiles(ceil_div(params_.n, Spec::kBlockN)) {
    if (params.expert_offsets == nullptr) {  // one matrix: nothing to look up
      count = ceil_div(params.slots, Spec::kBlockM) * column_tiles;
      return;
    }
    constexpr int kMostExperts =
        (Spec::kMaxExperts + Spec::kNumThreads - 1) / Spec::kNumThreads;  // of a thread: neighbours
    const int experts = ceil_div(params.experts, Spec::kNumThreads);
    const int first = ptx::thread_index() * experts;
    int tiles[kMostExperts + 1];
#pragma unroll
    for (int i = 0; i <= kMostExperts; ++i)  // all loads in flight together
      tiles[i] = i <= experts && first + i <= params.experts ? load_offset(first + i) : 0;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kMostExperts; ++i) {
      const bool valid = i < experts && first + i < params.experts;
      tiles[i] = valid ? ceil_div(tiles[i + 1] - tiles[i], Spec::kBlockM) : 0;
      sum += tiles[i];
    }
    const int inclusive = warp_prefix_sum(sum);
    if (ptx::lane_index() == 31) ptx::st_shared_32(words_smem + 4 * ptx::warp_index(), inclusive);
    ptx::barrier_sync_block();  // every warp's sum is there
    int before = inclusive - sum;
    int total = 0;
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) {
      const int of_warp = ptx::ld_shared_32(words_smem + 4 * warp);
      if (warp < ptx::warp_index()) before += of_warp;
      total += of_warp;
    }
#pragma unroll
    for (int i = 0; i < kMostExperts; ++i) {
      if (i < experts && first + i < params.experts) ptx::st_shared_32(list_smem + 4 * (first + i), before);
      before += tiles[i];
    }
    count = total * column_tiles;
    ptx::barrier_sync_block();  // the list is whole
  }

  __device__ __forceinline__ int load_offset(int expert) const { return first_row_of(params, expert); }

  __device__ __forceinline__ int first_of(int expert) const {
    return static_cast<int>(ptx::ld_shared_32(list_smem + 4 * expert)) * column_tiles;
  }

  // number: 0 to count - 1.
  __device__ __forceinline__ Tile find(int number) const {
    if (params.expert_offsets == nullptr) {
      const int row_tiles = ceil_div(params.slots, Spec::kBlockM);
      const int column_tile = number / row_tiles;
      const int row = (number - column_tile * row_tiles) * Spec::kBlockM;
      return Tile{0, row, minimum(params.slots - row, Spec::kBlockM), column_tile * Spec::kBlockN};
    }
    int expert = 0;  // becomes the last whose first tile is not past it: one with rows
#pragma unroll
    for (int step = Spec::kMaxExperts / 2; step > 0; step /= 2)
      if (expert + step < params.experts && first_of(expert + step) <= number) expert += step;
    const int begin = load_offset(expert);
    const int end = load_offset(expert + 1);
    const int row_tiles = ceil_div(end - begin, Spec::kBlockM);
    const int local = number - first_of(expert);
    const int column_tile = local / row_tiles;
    const int row = begin + (local - column_tile * row_tiles) * Spec::kBlockM;
    return Tile{expert, row, minimum(end - row, Spec::kBlockM), column_tile * Spec::kBlockN};
  }
};

// This lane's expert of params.ids, -1: none.
__device__ __forceinline__ int chosen_expert(const GemmParams& params) {
  const int lane = ptx::lane_index();
  if (lane >= params.slots) return -1;
  uint32_t id[2] = {0, 0};
  if (params.id_bytes == 8) {
    ptx::ld_global_64(id, static_cast<const int64_t*>(params.ids) + lane);
  } else {
    id[0] = ptx::ld_global_32(static_cast<const int32_t*>(params.ids) + lane);
  }
  return id[1] == 0 && id[0] < static_cast<uint32_t>(params.experts) ? static_cast<int>(id[0]) : -1;
}

// The weights of tile `number` of at most 32 slots, from params.ids: expert and column as TileList will find them; no rows, and
// expert -1 where there is no such tile. By whole warps.
template <typename Spec>
__device__ __forceinline__ Tile find_early(const GemmParams& params, int number) {
  const int expert = chosen_expert(params);
  int rows = 0;  // of this lane's expert; a lane in front of which another one has it leaves it to that one
  bool is_first = expert >= 0;
  for (int other = 0; other < params.slots; ++other) {
    const bool is_alike = ptx::shuffle_index(expert, other) == expert;
    rows += is_alike ? 1 : 0;
    if (is_alike && other < ptx::lane_index()) is_first = false;
  }
  const int row_tiles = is_first ? ceil_div(rows, Spec::kBlockM) : 0;
  int before = 0;  // row tiles of the experts before this lane's
  for (int other = 0; other < params.slots; ++other) {
    const int other_tiles = ptx::shuffle_index(row_tiles, other);
    if (ptx::shuffle_index(expert, other) < expert) before += other_tiles;
  }
  const int column_tiles = ceil_div(params.n, Spec::kBlockN);
  const int local = number - before * column_tiles;
  const uint32_t owner = ptx::vote_ballot(local >= 0 && local < row_tiles * column_tiles);
  if (owner == 0) return Tile{-1, 0, 0, 0};
  const int lane = ptx::population_count((owner & -owner) - 1);
  const int column_tile = row_tiles > 0 ? local / row_tiles : 0;
  return Tile{ptx::shuffle_index(expert, lane), 0, 0, ptx::shuffle_index(column_tile, lane) * Spec::kBlockN};
}

}  // namespace flashmoe::moe::few_rows
