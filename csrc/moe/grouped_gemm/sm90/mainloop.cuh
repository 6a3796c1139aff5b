// A consumer warpgroup: the products of its rows of each tile, each followed by an epilogue; and the frame of the
// kernels. In a tile of 256 rows a consumer has two blocks of 64 rows, with the other consumer's first block between
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
__device__ __forceinline__ void issue_stage(float (&sums)[kAllBlocks][Spec::kAccumulators],
                                            const SharedMemory<Spec>& shared, int stage, int first_row, bool is_first) {
  const KMajorOperand<Spec::kBlockM> a = typename Spec::ATile{shared.a(stage) + first_row * kSlabRowBytes}.k_major();
  const auto b = shared.template b_operand<kWeights>(stage);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < Spec::kBlockK / 16; ++step) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::wgmma_ss<typename Spec::Element, Spec::kBlockN, decltype(b)::kIsTransposed>(
          sums[block], a.k_step(step, block * kRowStride), b.k_step(step), step == 0 && is_first ? 0 : 1);
    }
  }
  ptx::wgmma_commit();
}

template <typename Spec, Weights kWeights>
struct Mainloop {
  const SharedMemory<Spec> shared;
  const int consumer;
  const bool is_first_lane;
  RingPosition<Spec::kNumStages> at;

  __device__ __forceinline__ Mainloop(const SharedMemory<Spec>& shared_, int consumer_)
      : shared(shared_), consumer(consumer_), is_first_lane(ptx::lane_index() == 0) {}

  // One arrival per warp: its wgmma_wait ensures that its share of the product has read the stage.
  __device__ __forceinline__ void release(int stage) const {
    if (is_first_lane) ptx::mbarrier_arrive(shared.empty(stage));
  }

  using Sums = float[Spec::kRowBlocks][Spec::kAccumulators];

  template <int kBlocks>
  __device__ __forceinline__ void issue(Sums& sums, bool is_first) const {
    issue_stage<Spec, kWeights, 64 * Spec::kNumConsumers, kBlocks>(sums, shared, at.stage, consumer * 64, is_first);
  }

  __device__ __forceinline__ void wait_full() const {
    ptx::mbarrier_wait(shared.full(at.stage), at.parity);
    // cp.async writes like ordinary stores; wgmma reads through the asynchronous proxy.
    if constexpr (Spec::kGathersA) ptx::fence_proxy_async_shared();
  }

  // One batch of products is in flight while the next is issued; a stage is released after the next batch has been
  // issued.
  template <int kBlocks>
  __device__ __forceinline__ void multiply(Sums& sums, int blocks) {
    wait_full();
    issue<kBlocks>(sums, true);
    int before = at.stage;
    at.advance();
    for (int block = 1; block < blocks; ++block) {
      wait_full();
      issue<kBlocks>(sums, false);
      ptx::wgmma_wait<1>();
      release(before);
      before = at.stage;
      at.advance();
    }
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) ptx::wgmma_fence_operands(sums[block]);
    release(before);
  }

  // `rows`: those of the expert, from this consumer's first one on. A second block without rows is not multiplied.
  __device__ __forceinline__ void multiply(Sums& sums, int blocks, int rows) {
    if (Spec::kRowBlocks == 1 || rows > 64 * Spec::kNumConsumers) {
      multiply<Spec::kRowBlocks>(sums, blocks);
    } else {
      multiply<1>(sums, blocks);
    }
  }

  // Skips a tile in which this consumer has no rows.
  __device__ __forceinline__ void skip(int blocks) {
    for (int block = 0; block < blocks; ++block, at.advance()) {
      ptx::mbarrier_wait(shared.full(at.stage), at.parity);
      ptx::warp_sync();  // no lane of the warp still waits for the stage that its first lane releases
      release(at.stage);
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
__device__ __forceinline__ void consume(const GemmParams& params, const SharedMemory<Spec>& shared, int consumer,
                                        Epilogue epilogue) {
  const int blocks = ceil_div(params.k, Spec::kBlockK);
  Mainloop<Spec, kWeights> mainloop(shared, consumer);
  RingPosition<Spec::kNumTileSlots> slot;
  while (true) {
    const Tile tile = take_tile<Spec>(shared, slot);
    if (tile.expert < 0) break;
    const WarpgroupTile<Spec> own = warpgroup_tile<Spec>(tile, consumer);
    if (own.rows <= 0) {
      mainloop.skip(blocks);
      continue;
    }
    float sums[Spec::kRowBlocks][Spec::kAccumulators];
    mainloop.multiply(sums, blocks, own.rows);
#pragma unroll
    for (int block = 0; block < Spec::kRowBlocks; ++block) {
      const int first = block * Spec::kNumConsumers * 64;
      const WarpgroupTile<Spec> block_tile{own.expert, own.row + first, own.rows - first, own.column};
      if (block_tile.rows > 0) epilogue.store(block_tile, sums[block]);
    }
  }
  epilogue.finish();
}

// The whole kernel. a_map: null if rows are gathered. Epilogue: constructed from (params, shared, consumer, maps...);
// store(tile, sums) stores the sums of a WarpgroupTile, finish() completes its work.
template <typename Spec, Weights kWeights, typename Epilogue, typename... Maps>
__device__ __forceinline__ void run_grouped_gemm(const GemmParams& params, const ptx::TensorMap* a_map,
                                                 const ptx::TensorMap& b_map, const Maps&... maps) {
  const SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    if constexpr (!Spec::kGathersA) ptx::prefetch_tensor_map(a_map);
    ptx::prefetch_tensor_map(&b_map);
    (ptx::prefetch_tensor_map(&maps), ...);
    init_barriers(shared);
  }
  ptx::barrier_sync_block();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if (warpgroup == 0) {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    produce<Spec, kWeights>(params, shared, warp, a_map, b_map);
  } else {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    consume<Spec, kWeights>(params, shared, consumer, Epilogue(params, shared, consumer, maps...));
  }
}

}  // namespace flashmoe::moe::sm90
