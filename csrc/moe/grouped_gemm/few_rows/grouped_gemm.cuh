// Grouped matrix products for few rows per expert, on sm_80 and every later GPU.
//
// The time is that of streaming the weights, so only the depth of the stream matters: several blocks per
// multiprocessor, each with a ring of cp.async stages and one tile at a time. Blocks fetch tiles until none are left.
#pragma once

#include "device/persistent.cuh"
#include "moe/grouped_gemm/few_rows/epilogue.cuh"
#include "moe/grouped_gemm/few_rows/load.cuh"
#include "moe/grouped_gemm/few_rows/multiply.cuh"
#include "moe/grouped_gemm/few_rows/spec.cuh"
#include "moe/grouped_gemm/few_rows/tiles.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe::moe::few_rows {

// One tile's walk over k: its loaders, and the ring of stages.
template <typename Spec, Weights kWeights, bool kIsGated>
struct Stream {
  const ptx::SmemPointer ring_smem;  // [kNumStages] of weights, then rows
  const int stages;                  // stages that k takes
  WeightLoader<Spec, kWeights, kIsGated> weights;

  __device__ __forceinline__ Stream(const GemmParams& params, const Tile& tile, ptx::SmemPointer ring)
      : ring_smem(ring), stages(ceil_div(params.k, Spec::kBlockK)), weights(params, tile) {}

  __device__ __forceinline__ ptx::SmemPointer stage_smem(int stage) const {
    return ring_smem + stage * Spec::kStageBytes;
  }

  // Loads the first stages of weights. Their rows may be loaded later: the copies then join the group of stage 0's
  // rows.
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int ahead = 0; ahead < Spec::kNumStages - 1; ++ahead)
      if (ahead < stages) weights.load(stage_smem(ahead));
  }

  // Another stream has already started this one's weights.
  __device__ __forceinline__ void take_over() {
    for (int ahead = 0; ahead < Spec::kNumStages - 1; ++ahead)
      if (ahead < stages) weights.advance();
  }

  // multiply(accumulator, stage in shared memory, its index, rows): the products of one stage.
  template <typename Multiply>
  __device__ __forceinline__ void accumulate(const GemmParams& params, const Tile& tile, Accumulator<Spec>& accumulator,
                                             Multiply multiply) {
    RowLoader<Spec> rows(params, tile);
#pragma unroll
    for (int ahead = 0; ahead < Spec::kNumStages - 1; ++ahead) {
      if (ahead < stages) rows.load(stage_smem(ahead) + Spec::kWeightBytes);
      ptx::cp_async_commit();
    }
    int read_stage = 0;
    int write_stage = Spec::kNumStages - 1;
    for (int step = 0; step < stages; ++step) {
      ptx::cp_async_wait<Spec::kNumStages - 2>();
      ptx::barrier_sync_block();  // this stage is complete; all warps are done with the one before, which is refilled
      if (step + Spec::kNumStages - 1 < stages) {
        weights.load(stage_smem(write_stage));
        rows.load(stage_smem(write_stage) + Spec::kWeightBytes);
      }
      ptx::cp_async_commit();
      multiply(accumulator, stage_smem(read_stage), step, tile.rows);
      write_stage = read_stage;
      read_stage = read_stage == Spec::kNumStages - 1 ? 0 : read_stage + 1;
    }
  }
};

// The products and results of 16-bit operands.
template <typename Spec, Weights kWeights, bool kIsGated>
struct Products {
  using Params = GemmParams;

  static __device__ __forceinline__ const GemmParams& gemm(const GemmParams& params) { return params; }

  static __device__ __forceinline__ void accumulate(const GemmParams& params, Stream<Spec, kWeights, kIsGated>& stream,
                                                    const Tile& tile, Accumulator<Spec>& accumulator) {
    stream.accumulate(params, tile, accumulator, [](auto& products, ptx::SmemPointer stage_smem, int, int rows) {
      multiply_stage<Spec, kWeights>(products, stage_smem, rows);
    });
  }

  static __device__ __forceinline__ void store(const GemmParams& params, const Tile& tile, const WarpSums<Spec>& sums) {
    if constexpr (kIsGated) {
      with_activation(params.activation,
                      [&](auto activation) { store_gated<Spec, kWeights>(params, tile, sums, activation); });
    } else {
      store_plain<Spec>(params, tile, sums);
    }
  }
};

template <typename Spec, Weights kWeights, bool kIsGated, typename Product = Products<Spec, kWeights, kIsGated>>
__device__ __forceinline__ void multiply_tiles(const typename Product::Params& all) {
  const GemmParams& params = Product::gemm(all);
  const ptx::SmemPointer ring_smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer list_smem = ring_smem + Spec::kNumStages * Spec::kStageBytes;
  const ptx::SmemPointer warp_counts_smem = list_smem + Spec::kListBytes;
  const ptx::SmemPointer next_smem = warp_counts_smem + 4 * Spec::kNumWarps;

  // A gated product follows the sort: with few slots the first weights are loaded while the sort still runs. A plain
  // product follows another product, which started when the sort had ended: the offsets are written, and the first
  // weights are loaded while a is still being written.
  int tile_index = ptx::block_index();
  bool has_started = false;
  if (kIsGated && params.ids == nullptr) ptx::grid_dependency_wait();
  const TileList<Spec> tiles(params, list_smem, warp_counts_smem);
  if (kIsGated && params.ids != nullptr) {
    has_started = tile_index < tiles.count;
    if (has_started) Stream<Spec, kWeights, kIsGated>(params, tiles.find_weights(tile_index), ring_smem).start();
    ptx::grid_dependency_wait();
  }
  bool has_waited = kIsGated;
  while (tile_index < tiles.count) {
    const Tile tile = tiles.find(tile_index);
    Stream<Spec, kWeights, kIsGated> stream(params, tile, ring_smem);
    if (has_started) {
      stream.take_over();
    } else {
      stream.start();
    }
    has_started = false;
    if (!has_waited) ptx::grid_dependency_wait();
    has_waited = true;
    ptx::grid_launch_dependents();
    if (ptx::thread_index() == 0)  // the tile after this one; until the previous kernel has ended, the counter is its
      ptx::st_shared_32(next_smem, next_tile_index(params.tile_counter, tiles.count, tile_index));

    Accumulator<Spec> accumulator = {};
    Product::accumulate(all, stream, tile, accumulator);
    ptx::barrier_sync_block();  // all warps are done with the ring; the next number is written
    tile_index = ptx::ld_shared_32(next_smem);
    const WarpSums<Spec> sums(ring_smem, accumulator);
    Product::store(all, tile, sums);
    ptx::barrier_sync_block();  // the ring may be refilled; the next number may be replaced
  }
  if (!has_waited) ptx::grid_dependency_wait();  // also in a block without tiles: the next kernel relies on its end
  ptx::cp_async_wait<0>();
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm(const GemmParams& params) {
  multiply_tiles<Spec, kWeights, false>(params);
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void grouped_gemm_gated(const GemmParams& params) {
  multiply_tiles<Spec, kWeights, true>(params);
}

}  // namespace flashmoe::moe::few_rows
