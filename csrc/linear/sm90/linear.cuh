// y = x W^T (+ bias) of one matrix W [n, k] for sm_90a, built from moe/'s grouped products (moe/grouped_gemm/sm90):
// TMA, wgmma, one producer and one or two consumer warpgroups.
//   grid     min(blocks that the GPU holds, work tiles); a work tile is a tile, or one segment of its sum over k
//            (params/linear.h)
//   maps     tensor_map.h
// All work tiles of a launch are equally long: there is no tile counter, and each warp computes which ones are its
// block's.
#pragma once

#include "device/persistent.cuh"
#include "linear/params/linear.h"
#include "moe/grouped_gemm/sm90/grouped_gemm.cuh"
#include "ptx/atomics.cuh"
#include "ptx/math.cuh"

namespace flashmoe::linear::sm90 {

using moe::Weights;

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs>
struct Spec : moe::sm90::GemmSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs> {
  // Wider tiles have no registers for a second set of sums and are only for undivided sums.
  static constexpr bool kHasSegments = kBlockN <= 160;
};

// What a block computes before it stores: segments `first` to `end` - 1 of a tile.
struct WorkTile {
  moe::Tile tile;
  int tile_index;
  int first_segment;
  int end_segment;
};

template <typename Spec>
struct TileScheduler {
  const LinearParams& params;
  const int blocks;    // of 64 k
  const int n_blocks;  // of columns
  const int segments;  // per tile
  const int work_per_tile;
  const int count;
  int work_index;

  __device__ __forceinline__ explicit TileScheduler(const LinearParams& params_)
      : params(params_),
        blocks(ceil_div(params_.gemm.k, Spec::kBlockK)),
        n_blocks(ceil_div(params_.gemm.n, Spec::kBlockN)),
        segments(Spec::kHasSegments ? params_.segments : 1),
        work_per_tile(Spec::kHasSegments && params_.partials != nullptr ? params_.segments : 1),
        count(ceil_div(params_.gemm.slots, Spec::kBlockM) * n_blocks * work_per_tile),
        work_index(ptx::block_index()) {}

  __device__ __forceinline__ bool has_next() const { return work_index < count; }

  __device__ __forceinline__ WorkTile next() {
    moe::ExpertWindow<Spec::kBlockM> matrix;
    matrix.expert = 0;
    matrix.tiles = ceil_div(params.gemm.slots, Spec::kBlockM);
    matrix.end_row = params.gemm.slots;
    const int tile_index = work_index / work_per_tile;
    const int first_segment = work_index - tile_index * work_per_tile;
    work_index = next_tile_index(nullptr, count, work_index);
    return WorkTile{matrix.tile(n_blocks, tile_index), tile_index, first_segment,
                    work_per_tile > 1 ? first_segment + 1 : segments};
  }

  // The first block of k of a segment; that of `segments` is the number of blocks.
  __device__ __forceinline__ int start(int segment) const { return segment * blocks / segments; }
};

template <typename Spec>
__device__ __forceinline__ void produce(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& smem,
                                        const ptx::TensorMap& a_map, const ptx::TensorMap& b_map) {
  RingPosition<Spec::kNumStages> state;
  const int bytes = Spec::kBBytes + Spec::kBlockM / 64 * minimum(params.gemm.slots, 64) * kSlabRowBytes;
  // Weights that no other tile reads are evicted first.
  const ptx::CacheHint hint =
      params.gemm.slots <= Spec::kBlockM ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kEvictNormal;
  for (TileScheduler<Spec> scheduler(params); scheduler.has_next();) {
    const WorkTile work = scheduler.next();
    // The shuffles tell the compiler that the lanes have the same work tile (moe/grouped_gemm/sm90/producer.cuh).
    const moe::Tile tile{0, ptx::shuffle_index(work.tile.first_row, 0), 0, ptx::shuffle_index(work.tile.n_block, 0)};
    const int end = ptx::shuffle_index(scheduler.start(work.end_segment), 0);
    for (int block = ptx::shuffle_index(scheduler.start(work.first_segment), 0); block < end;
         ++block, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        const int k = block * Spec::kBlockK;
        moe::sm90::load_rows<Spec>(smem.a(state.stage), a_map, full, tile, k);
        ptx::tma_load_4d(smem.b(state.stage), &b_map, full, k, tile.n_block * Spec::kBlockN, 0, 0, hint);
      }
      ptx::warp_sync();
    }
  }
}

// Adds the sums of all segments of a consumer's tile, in the block that arrives last. Returns false in the other
// blocks, which only store theirs.
template <typename Spec>
__device__ __forceinline__ bool add_segments(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& smem,
                                             int consumer, const WorkTile& work, int rows,
                                             float (&accum)[Spec::kAccumulators]) {
  constexpr int kSegmentSums = Spec::kAccumulators * 128;
  const int thread = ptx::thread_index() % 128;
  const int counter = work.tile_index * Spec::kNumConsumers + consumer;
  float* partials_gmem = params.partials + static_cast<int64_t>(counter) * params.segments * kSegmentSums + thread * 4;
  // The shuffle tells the compiler that a warp's lanes stay together; otherwise it keeps neither the ring position nor
  // any descriptor in a uniform register (nor does it if a tile's number may come from an atomic).
  const bool has_rows = ptx::shuffle_index(thread / 32, 0) * 16 < rows;
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < Spec::kAccumulators; i += 4) {
      const uint32_t words[4] = {ptx::float_bits(accum[i]), ptx::float_bits(accum[i + 1]),
                                 ptx::float_bits(accum[i + 2]), ptx::float_bits(accum[i + 3])};
      ptx::st_global_128(partials_gmem + work.first_segment * kSegmentSums + i * 128, words);
    }
  }
  const ptx::SmemPointer answer_smem = smem.tile(consumer);
  sync_consumer(consumer);  // its sums are stored
  if (thread == 0) {
    int32_t* arrivals_gmem = params.arrivals + counter;
    const bool is_last = ptx::atomic_add_global_ordered(arrivals_gmem, 1) == params.segments - 1;
    if (is_last) ptx::st_global_32(arrivals_gmem, 0);  // for the next launch
    ptx::st_shared_32(answer_smem, is_last ? 1u : 0u);
  }
  sync_consumer(consumer);  // read after write: the answer
  if (ptx::ld_shared_32(answer_smem) == 0) return false;
  if (!has_rows) return true;
  // Four sums over all segments at a time, not segment by segment, so that the loads of all segments are in flight
  // together.
#pragma unroll
  for (int i = 0; i < Spec::kAccumulators; i += 4) {
#pragma unroll
    for (int segment = 0; segment < kSegments; ++segment) {
      const float4 four = ptx::ld_global_float4(partials_gmem + segment * kSegmentSums + i * 128);
      const float partials[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) accum[i + j] = segment == 0 ? partials[j] : accum[i + j] + partials[j];
    }
  }
  return true;
}

// A box of fewer than 64 rows leaves the rest of a stage unwritten: it is zeroed once, while the first boxes are in
// flight.
template <typename Spec>
__device__ __forceinline__ void clear_absent_rows(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& smem,
                                                  int consumer) {
  constexpr uint32_t kZeros[4] = {0, 0, 0, 0};
  if (consumer > 0 || params.gemm.slots >= 64) return;
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    const ptx::SmemPointer rows_smem(smem.a(stage));
    for (int chunk = params.gemm.slots * 8 + ptx::thread_index() % 128; chunk < 64 * 8; chunk += 128)
      ptx::st_shared_128(rows_smem + chunk * 16, kZeros);
  }
  ptx::fence_proxy_async_shared();
  sync_consumer(consumer);  // read after write: wgmma reads what other threads have cleared
}

template <typename Spec>
__device__ __forceinline__ void consume(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& smem,
                                        int consumer, moe::sm90::PlainEpilogue<Spec> epilogue) {
  clear_absent_rows<Spec>(params, smem, consumer);
  moe::sm90::Mainloop<Spec, Weights::kNk> mainloop(smem, consumer);
  for (TileScheduler<Spec> scheduler(params); scheduler.has_next();) {
    const WorkTile work = scheduler.next();
    const auto blocks_of = [&](int segment) { return scheduler.start(segment + 1) - scheduler.start(segment); };
    const auto wg_tile = moe::sm90::warpgroup_tile<Spec>(work.tile, consumer);
    if (wg_tile.rows <= 0) {
      mainloop.skip(scheduler.start(work.end_segment) - scheduler.start(work.first_segment));
      continue;
    }
    float accum[1][Spec::kAccumulators];
    mainloop.multiply(accum, blocks_of(work.first_segment), wg_tile.rows);
    if constexpr (Spec::kHasSegments) {
      for (int segment = work.first_segment + 1; segment < work.end_segment; ++segment) {
        float further[1][Spec::kAccumulators];
        mainloop.multiply(further, blocks_of(segment), wg_tile.rows);
#pragma unroll
        for (int i = 0; i < Spec::kAccumulators; ++i) accum[0][i] += further[0][i];
      }
      if (scheduler.work_per_tile > 1 && !add_segments<Spec>(params, smem, consumer, work, wg_tile.rows, accum[0]))
        continue;
    }
    epilogue.store(wg_tile, accum[0]);
  }
  epilogue.finish();
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void linear(const LinearParams& params, const ptx::TensorMap& a_map,
                                       const ptx::TensorMap& b_map, const ptx::TensorMap& d_map) {
  static_assert(kWeights == Weights::kNk, "only weights [n, k]");
  const moe::sm90::SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const int warp = moe::sm90::start_block(smem, &a_map, b_map, d_map).warp;
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  if (warp < 4) {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0) produce<Spec>(params, smem, a_map, b_map);
  } else {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    consume<Spec>(params, smem, consumer, moe::sm90::PlainEpilogue<Spec>(params.gemm, smem, consumer, d_map));
  }
}

}  // namespace flashmoe::linear::sm90
