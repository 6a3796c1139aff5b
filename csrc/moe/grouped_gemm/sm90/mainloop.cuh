// A consumer warpgroup: the products of its rows of each tile, each followed by an epilogue; and the whole
// kernel. In a tile of 256 rows a consumer has two blocks of 64 rows, with the other consumer's first block between
// them, so that both have work in a partial tile.
//
// The sum over k is one chain of products of 16 k each, in ascending order: a row's bits depend on nothing else.
#pragma once

#include "device/warpgroup_product.cuh"
#include "moe/grouped_gemm/sm90/producer.cuh"
#include "moe/grouped_gemm/sm90/spec.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/register_control.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::moe::sm90 {

// Issues the products of 64 k of a stage, asynchronously: kBlocks blocks of 64 rows, kRowStride rows apart, from
// `first_row` on, with all columns.
template <typename Spec, Weights kWeights, int kRowStride, int kBlocks, int kAllBlocks>
__device__ __forceinline__ void issue_stage(float (&accum)[kAllBlocks][Spec::kAccumulators],
                                            const SharedMemory<Spec>& smem, int stage, int first_row, bool is_first) {
  const KMajorOperand<Spec::kBlockM> a = typename Spec::ATile{smem.a(stage) + first_row * kSlabRowBytes}.k_major();
  const auto b = smem.template b_operand<kWeights>(stage);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Spec::kBlockK / 16; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::wgmma_ss<typename Spec::Element, Spec::kBlockN, decltype(b)::kIsTransposed>(
          accum[block], a.k_step(step, block * kRowStride), b.k_step(step), step == 0 && is_first ? 0 : 1);
    }
  }
  ptx::wgmma_commit();
}

template <typename Spec, Weights kWeights>
struct Mainloop {
  const SharedMemory<Spec> smem;
  const int consumer;
  const bool is_first_lane;
  RingPosition<Spec::kNumStages> state;

  __device__ __forceinline__ Mainloop(const SharedMemory<Spec>& smem_, int consumer_)
      : smem(smem_), consumer(consumer_), is_first_lane(ptx::lane_index() == 0) {}

  // One arrival per warp: its wgmma_wait ensures that its share of the product has read the stage.
  __device__ __forceinline__ void release(int stage) const {
    if (is_first_lane) ptx::mbarrier_arrive(smem.empty(stage));
  }

  using Accumulators = float[Spec::kRowBlocks][Spec::kAccumulators];

  template <int kBlocks>
  __device__ __forceinline__ void issue(Accumulators& accum, bool is_first) const {
    issue_stage<Spec, kWeights, 64 * Spec::kNumConsumers, kBlocks>(accum, smem, state.stage, consumer * 64, is_first);
  }

  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(smem.full(state.stage), state.parity);
    // cp.async writes like ordinary stores; wgmma reads through the asynchronous proxy.
    if constexpr (Spec::kGathersA) ptx::fence_proxy_async_shared();
  }

  // One batch of products is in flight while the next is issued; a stage is released after the next batch has been
  // issued.
  template <int kBlocks>
  __device__ __forceinline__ void multiply(Accumulators& accum, int blocks) {
    wait_full();
    issue<kBlocks>(accum, true);
    int before = state.stage;
    state.advance();
    for (int block = 1; block < blocks; ++block) {
      wait_full();
      issue<kBlocks>(accum, false);
      ptx::wgmma_wait<1>();
      release(before);
      before = state.stage;
      state.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::wgmma_fence_operands(accum[block]);
    release(before);
  }

  // `rows`: those of the expert, from this consumer's first one on. A second block without rows is not multiplied.
  __device__ __forceinline__ void multiply(Accumulators& accum, int blocks, int rows) {
    if (Spec::kRowBlocks == 1 || rows > 64 * Spec::kNumConsumers) {
      multiply<Spec::kRowBlocks>(accum, blocks);
    } else {
      multiply<1>(accum, blocks);
    }
  }

  // Skips a tile in which this consumer has no rows.
  __device__ __forceinline__ void skip(int blocks) {
    for (int block = 0; block < blocks; ++block, state.advance()) {
      ptx::mbarrier_wait(smem.full(state.stage), state.parity);
      ptx::warp_sync();  // no lane of the warp still waits for the stage that its first lane releases
      release(state.stage);
    }
  }
};

// A consumer's part of a tile, in the result.
template <typename Spec>
struct WarpgroupTile {
  int expert;
  int row;     // first
  int rows;    // that belong to the expert, at least one; 64 or more: all
  int column;  // first; if kIsGated, the first of gate
};

template <typename Spec>
__device__ __forceinline__ WarpgroupTile<Spec> warpgroup_tile(const Tile& tile, int consumer) {
  const int row = tile.first_row + consumer * 64;
  return WarpgroupTile<Spec>{tile.expert, row, tile.end_row - row, tile.n_block * Spec::kOutputColumns};
}

template <typename Spec, Weights kWeights, typename Epilogue>
__device__ __forceinline__ void consume(const GemmParams& params, const SharedMemory<Spec>& smem, int consumer,
                                        Epilogue epilogue) {
  const int blocks = ceil_div(params.k, Spec::kBlockK);
  Mainloop<Spec, kWeights> mainloop(smem, consumer);
  RingPosition<Spec::kNumTileSlots> tile_state;
  while (true) {
    const Tile tile = next_tile<Spec>(smem, tile_state);
    if (tile.expert < 0) break;
    const WarpgroupTile<Spec> wg_tile = warpgroup_tile<Spec>(tile, consumer);
    if (wg_tile.rows <= 0) {
      mainloop.skip(blocks);
      continue;
    }
    float accum[Spec::kRowBlocks][Spec::kAccumulators];
    mainloop.multiply(accum, blocks, wg_tile.rows);
#pragma unroll
    for (int block = 0; block < Spec::kRowBlocks; ++block) {
      const int first = block * Spec::kNumConsumers * 64;
      const WarpgroupTile<Spec> block_tile{wg_tile.expert, wg_tile.row + first, wg_tile.rows - first, wg_tile.column};
      if (block_tile.rows > 0) epilogue.store(block_tile, accum[block]);
    }
  }
  epilogue.finish();
}

// The whole kernel. a_map: null if rows are gathered. Epilogue: constructed from (params, smem, consumer, maps...);
// store(tile, accum) stores the sums of a WarpgroupTile, finish() completes its work.
template <typename Spec, Weights kWeights, typename Epilogue, typename... Maps>
__device__ __forceinline__ void run_grouped_gemm(const GemmParams& params, const ptx::TensorMap* a_map,
                                                 const ptx::TensorMap& b_map, const Maps&... maps) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const auto [warp, warpgroup] = start_block(smem, a_map, b_map, maps...);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if (warpgroup == 0) {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    produce<Spec, kWeights>(params, smem, warp, a_map, b_map);
  } else {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    consume<Spec, kWeights>(params, smem, consumer, Epilogue(params, smem, consumer, maps...));
  }
}

}  // namespace flashmoe::moe::sm90
