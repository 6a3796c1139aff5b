// The producer warpgroup: its first warp fetches tiles, publishes them to all warps and issues TMA loads; if rows of A
// are gathered, its four warps copy them.
#pragma once

#include "device/persistent.cuh"
#include "moe/grouped_gemm/sm90/spec.cuh"
#include "moe/grouped_gemm/tiles.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::moe::sm90 {

struct WarpRole {
  int warp, warpgroup;
};

// Prefetches the tensor maps and initializes the barriers. The shuffle tells the compiler that the role is the same in
// the whole warp.
template <typename Spec, typename... Maps>
__device__ __forceinline__ WarpRole start_block(const SharedMemory<Spec>& smem, const ptx::TensorMap* a_map,
                                                const Maps&... maps) {
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;
  if (warp == 0 && ptx::elect_one()) {
    if constexpr (!Spec::kGathersA) ptx::prefetch_tensor_map(a_map);
    (ptx::prefetch_tensor_map(&maps), ...);
    init_barriers(smem);
  }
  ptx::barrier_sync_block();
  return {warp, warpgroup};
}

// The number of column tiles of the result.
template <typename Spec>
__device__ __forceinline__ int column_tiles(const GemmParams& params) {
  return ceil_div(Spec::kIsGated ? params.n / 2 : params.n, Spec::kOutputColumns);
}

// Loads 64 k of the tile's weights, from `k` on. What is outside an expert's weights becomes zeros.
template <typename Spec, Weights kWeights>
__device__ __forceinline__ void load_weights(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                             const Tile& tile, int k) {
  constexpr ptx::CacheHint kHint = ptx::CacheHint::kEvictNormal;
  const int column = tile.n_block * Spec::kOutputColumns;
  if constexpr (Spec::kIsGated && kWeights != Weights::kKnPairs) {
#pragma unroll
    for (int slab = 0; slab < Spec::kBlockN / 128; ++slab) {  // 64 columns of gate and of up
      const int first = column + slab * 64;
      constexpr bool kIsNk = kWeights == Weights::kNk;
      ptx::tma_load_4d(smem + slab * 2 * Spec::kSlabBytes, &map, full, kIsNk ? k : first, kIsNk ? first : k, 0,
                       tile.expert, kHint);
    }
  } else if constexpr (kWeights == Weights::kNk) {
    ptx::tma_load_4d(smem, &map, full, k, column, 0, tile.expert, kHint);
  } else {
    const int first = Spec::kIsGated ? 2 * column : column;
#pragma unroll
    for (int slab = 0; slab < Spec::kBlockN / 64; ++slab) {
      ptx::tma_load_4d(smem + slab * Spec::kSlabBytes, &map, full, first + slab * 64, k, 0, tile.expert, kHint);
    }
  }
}

// Loads 64 k of the tile's rows of A, which are contiguous, 64 rows per slab. Rows of the next expert may be among
// them: their products are not stored.
template <typename Spec>
__device__ __forceinline__ void load_rows(unsigned char* smem, const ptx::TensorMap& map, ptx::Mbarrier* full,
                                          const Tile& tile, int k, int slabs = Spec::kBlockM / 64) {
#pragma unroll
  for (int slab = 0; slab < Spec::kBlockM / 64; ++slab) {
    if (slab >= slabs) break;
    ptx::tma_load_4d(smem + slab * Spec::kSlabBytes, &map, full, k, tile.first_row + slab * 64, 0, 0,
                     ptx::CacheHint::kEvictNormal);
  }
}

// The rows of A that a producer thread copies: one of every 16, and one 16-byte chunk of each 64 k, so that eight
// neighbouring threads read 128 bytes of a row.
template <typename Spec>
struct GatheredRows {
  static constexpr int kRows = Spec::kBlockM / 16;
  const unsigned char* row_gmem[kRows];  // at this thread's chunk
  uint32_t valid;                        // bit i: row i belongs to the expert

  __device__ __forceinline__ void find(const GemmParams& params, const Tile& tile) {
    const int thread = ptx::thread_index();
    int slots[kRows];
    valid = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = tile.first_row + i * 16 + thread / 8;
      const bool is_valid = row < tile.end_row;
      valid |= (is_valid ? 1u : 0u) << i;
      slots[i] = is_valid ? static_cast<int>(ptx::ld_global_32(params.a_slots + row)) : 0;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      row_gmem[i] = static_cast<const unsigned char*>(params.a) +
                    (slots[i] / params.top_k * params.a_stride + thread % 8 * 8) * 2;
    }
  }

  // Copies the next 64 k, from `k` on, of at least the first `rows` rows. What is outside becomes zeros.
  __device__ __forceinline__ void copy(const GemmParams& params, unsigned char* smem, int k, int rows = Spec::kBlockM) {
    const int thread = ptx::thread_index();
    const int row = thread / 8;
    const ptx::SmemPointer to = ptx::SmemPointer(smem) + (row * 128 + (thread % 8 ^ row % 8) * 16);
    const uint32_t present = k + thread % 8 * 8 < params.k ? valid : 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (i * 16 >= rows) break;
      ptx::cp_async_16(to + i * 16 * 128, row_gmem[i], (present >> i & 1) != 0 ? 16 : 0);
      row_gmem[i] += 128;
    }
  }
};

// The work of each producer warp for a tile. kIsScaled: of a tile with at most 64 rows the consumers read only those
// rows, so the others are not loaded (except when rows are gathered: there this spills).
template <typename Spec, Weights kWeights, bool kIsScaled>
struct TileLoads {
  const GemmParams& params;
  const SharedMemory<Spec> smem;
  const ptx::TensorMap* a_map;  // null if rows are gathered
  const ptx::TensorMap& b_map;
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ void operator()(const Tile& tile, int warp) {
    if constexpr (Spec::kGathersA) {
      gather(tile, warp);
    } else {
      load(same_in_all_lanes(tile), 0);
    }
  }

  // The first tile, before any wait for the previous grid. That grid writes A; weights and the experts' offsets are
  // older, and weights fill the ring. Returns fetch_next(), which must follow the wait.
  template <typename FetchNext>
  __device__ __forceinline__ int start(const Tile& fetched, FetchNext fetch_next) {
    const Tile tile = same_in_all_lanes(fetched);
    const int slabs = slabs_of(tile);
    const int stages = minimum(ceil_div(params.k, Spec::kBlockK), Spec::kNumStages);
    for (int stage = 0; stage < stages; ++stage) {
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(smem.full(stage), Spec::kBBytes + slabs * Spec::kSlabBytes);
        load_weights<Spec, kWeights>(smem.b(stage), b_map, smem.full(stage), tile, stage * Spec::kBlockK);
      }
      ptx::warp_sync();
    }
    ptx::grid_dependency_wait();
    ptx::grid_launch_dependents();
    const int next_index = fetch_next();
    for (int stage = 0; stage < stages; ++stage, state.advance()) {
      if (ptx::elect_one()) {
        load_rows<Spec>(smem.a(stage), *a_map, smem.full(stage), tile, stage * Spec::kBlockK, slabs);
      }
      ptx::warp_sync();
    }
    load(tile, stages * Spec::kBlockK);
    return next_index;
  }

  // All lanes run the loop, and the shuffles tell the compiler that they have the same tile. In a loop of one lane the
  // compiled code checks at each copy whether its lanes agree, which takes longer than the copies of few columns.
  static __device__ __forceinline__ Tile same_in_all_lanes(const Tile& fetched) {
    return Tile{ptx::shuffle_index(fetched.expert, 0), ptx::shuffle_index(fetched.first_row, 0),
                ptx::shuffle_index(fetched.end_row, 0), ptx::shuffle_index(fetched.n_block, 0)};
  }

  static __device__ __forceinline__ int slabs_of(const Tile& tile) {
    if constexpr (!kIsScaled) return Spec::kBlockM / 64;
    return minimum(ceil_div(tile.end_row - tile.first_row, 64), Spec::kBlockM / 64);
  }

  // Loads from k = first_k on.
  __device__ __forceinline__ void load(const Tile& tile, int first_k) {
    const int slabs = slabs_of(tile);
    for (int k = first_k; k < params.k; k += Spec::kBlockK, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(full, Spec::kBBytes + slabs * Spec::kSlabBytes);
        load_rows<Spec>(smem.a(state.stage), *a_map, full, tile, k, slabs);
        load_weights<Spec, kWeights>(smem.b(state.stage), b_map, full, tile, k);
      }
      ptx::warp_sync();
    }
  }

  __device__ __forceinline__ void gather(const Tile& tile, int warp) {
    const bool is_issuer = warp == 0 && ptx::lane_index() == 0;
    GatheredRows<Spec> rows;
    rows.find(params, tile);
    for (int k = 0; k < params.k; k += Spec::kBlockK, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if (is_issuer) {
        ptx::mbarrier_arrive_expect_tx(full, Spec::kBBytes);
        load_weights<Spec, kWeights>(smem.b(state.stage), b_map, full, tile, k);
      }
      rows.copy(params, smem.a(state.stage), k);
      ptx::mbarrier_arrive_cp_async(full);
    }
  }
};

// The loop of the first warp. The lane whose expert owns the tile publishes it. kMayStart: loads have start(), and
// overlaps_previous_grid says whether they begin with it; until then the tile counter belongs to the previous grid.
template <typename Spec, bool kMayStart, typename Loads>
__device__ __forceinline__ void schedule_tiles(const GemmParams& params, const SharedMemory<Spec>& smem, Loads& loads,
                                               bool overlaps_previous_grid) {
  const bool is_first_lane = ptx::lane_index() == 0;
  const int n_blocks = column_tiles<Spec>(params);
  const int num_tiles = count_row_tiles<Spec::kBlockM>(params) * n_blocks;
  ExpertWindow<Spec::kBlockM> window;
  RingPosition<Spec::kNumTileSlots> tile_state;
  int tile_index = ptx::block_index();
  const auto fetch_next = [&] {
    return is_first_lane ? next_tile_index(params.tile_counter, num_tiles, tile_index) : 0;
  };
  if constexpr (kMayStart) {
    if (overlaps_previous_grid && tile_index < num_tiles) {
      if (window.seek(params, n_blocks, tile_index)) {
        publish_tile(smem.tile(tile_state.stage), window.tile(n_blocks, tile_index));
      }
      ptx::warp_sync();
      if (is_first_lane) ptx::mbarrier_arrive(smem.tile_full(tile_state.stage));
      tile_index = ptx::shuffle_index(loads.start(read_tile<Tile>(smem.tile(tile_state.stage)), fetch_next), 0);
      tile_state.advance();
    }
  }
  for (;; tile_state.advance()) {
    // One tile ahead: the counter's answer arrives while this tile's loads are issued.
    int next_index = 0;
    if (is_first_lane && tile_index < num_tiles)
      next_index = next_tile_index(params.tile_counter, num_tiles, tile_index);
    ptx::mbarrier_wait(smem.tile_empty(tile_state.stage), tile_state.parity ^ 1);
    if (tile_index >= num_tiles) {
      if (is_first_lane) publish_tile(smem.tile(tile_state.stage), Tile{-1, 0, 0, 0});
    } else if (window.seek(params, n_blocks, tile_index)) {
      publish_tile(smem.tile(tile_state.stage), window.tile(n_blocks, tile_index));
    }
    ptx::warp_sync();
    if (is_first_lane) ptx::mbarrier_arrive(smem.tile_full(tile_state.stage));
    if (tile_index >= num_tiles) break;
    loads(read_tile<Tile>(smem.tile(tile_state.stage)), 0);
    tile_index = ptx::shuffle_index(next_index, 0);
  }
}

// Called by a warp that reads the tiles. Returns the next tile.
template <typename Spec, typename TileType = Tile>
__device__ __forceinline__ TileType next_tile(const SharedMemory<Spec>& smem,
                                              RingPosition<Spec::kNumTileSlots>& tile_state) {
  ptx::mbarrier_wait(smem.tile_full(tile_state.stage), tile_state.parity);
  const TileType tile = read_tile<TileType>(smem.tile(tile_state.stage));
  ptx::warp_sync();  // all lanes have read it before the first one releases it
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(smem.tile_empty(tile_state.stage));
  tile_state.advance();
  return tile;
}

// loads(tile, warp): a warp's work for each tile.
template <typename Spec, bool kMayStart = false, typename Loads>
__device__ __forceinline__ void produce(const GemmParams& params, const SharedMemory<Spec>& smem, int warp,
                                        Loads& loads, bool overlaps_previous_grid = false) {
  if (warp == 0) {
    schedule_tiles<Spec, kMayStart>(params, smem, loads, overlaps_previous_grid);
    return;
  }
  if constexpr (Spec::kProducerWarps > 1) {
    if (warp >= Spec::kProducerWarps) return;
    RingPosition<Spec::kNumTileSlots> tile_state;
    while (true) {
      const Tile tile = next_tile<Spec>(smem, tile_state);
      if (tile.expert < 0) break;
      loads(tile, warp);
    }
  }
}

template <typename Spec, Weights kWeights, bool kIsScaled = false>
__device__ __forceinline__ void produce(const GemmParams& params, const SharedMemory<Spec>& smem, int warp,
                                        const ptx::TensorMap* a_map, const ptx::TensorMap& b_map,
                                        bool overlaps_previous_grid = false) {
  TileLoads<Spec, kWeights, kIsScaled> loads{params, smem, a_map, b_map, {}};
  produce<Spec, kIsScaled && !Spec::kGathersA>(params, smem, warp, loads, overlaps_previous_grid);
}

}  // namespace flashmoe::moe::sm90
