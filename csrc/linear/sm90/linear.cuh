// y = x W^T (+ bias) of one matrix W [n, k] for sm_90a, built from moe/'s grouped products (moe/grouped_gemm/sm90):
// TMA, wgmma, one producer and one or two consumer warpgroups.
//   grid     min(blocks that the GPU holds, pieces); a piece is a tile, or one segment of its sum over k
//            (params/linear.h)
//   maps     tensor_map.h
// All pieces of a launch are equally long: there is no tile counter, and each warp computes which pieces are its
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
struct Piece {
  moe::Tile tile;
  int index;  // of the tile
  int first;
  int end;
};

template <typename Spec>
struct Pieces {
  const LinearParams& params;
  const int blocks;    // of 64 k
  const int n_blocks;  // of columns
  const int segments;  // per tile
  const int of_tile;
  const int count;
  int number;

  __device__ __forceinline__ explicit Pieces(const LinearParams& params_)
      : params(params_),
        blocks(ceil_div(params_.gemm.k, Spec::kBlockK)),
        n_blocks(ceil_div(params_.gemm.n, Spec::kBlockN)),
        segments(Spec::kHasSegments ? params_.segments : 1),
        of_tile(Spec::kHasSegments && params_.partials != nullptr ? params_.segments : 1),
        count(ceil_div(params_.gemm.slots, Spec::kBlockM) * n_blocks * of_tile),
        number(ptx::block_index()) {}

  __device__ __forceinline__ bool has_next() const { return number < count; }

  __device__ __forceinline__ Piece take() {
    moe::ExpertWindow<Spec::kBlockM> matrix;
    matrix.expert = 0;
    matrix.tiles = ceil_div(params.gemm.slots, Spec::kBlockM);
    matrix.end_row = params.gemm.slots;
    const int index = number / of_tile;
    const int first = number - index * of_tile;
    number = next_tile_index(nullptr, count, number);
    return Piece{matrix.tile(n_blocks, index), index, first, of_tile > 1 ? first + 1 : segments};
  }

  // The first block of k of a segment; that of `segments` is the number of blocks.
  __device__ __forceinline__ int start(int segment) const { return segment * blocks / segments; }
};

template <typename Spec>
__device__ __forceinline__ void produce(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& shared,
                                        const ptx::TensorMap& a_map, const ptx::TensorMap& b_map) {
  RingPosition<Spec::kNumStages> at;
  const int bytes = Spec::kBBytes + Spec::kBlockM / 64 * minimum(params.gemm.slots, 64) * kSlabRowBytes;
  // Weights that no other tile reads are evicted first.
  const ptx::CacheHint hint =
      params.gemm.slots <= Spec::kBlockM ? ptx::CacheHint::kEvictFirst : ptx::CacheHint::kEvictNormal;
  for (Pieces<Spec> pieces(params); pieces.has_next();) {
    const Piece piece = pieces.take();
    // The shuffles tell the compiler that the lanes have the same piece (moe/grouped_gemm/sm90/producer.cuh).
    const moe::Tile tile{0, ptx::shuffle_index(piece.tile.first_row, 0), 0, ptx::shuffle_index(piece.tile.n_block, 0)};
    const int end = ptx::shuffle_index(pieces.start(piece.end), 0);
    for (int block = ptx::shuffle_index(pieces.start(piece.first), 0); block < end; ++block, at.advance()) {
      ptx::Mbarrier* full = shared.full(at.stage);
      ptx::mbarrier_wait(shared.empty(at.stage), at.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        const int k = block * Spec::kBlockK;
        moe::sm90::load_rows<Spec>(shared.a(at.stage), a_map, full, tile, k);
        ptx::tma_load_4d(shared.b(at.stage), &b_map, full, k, tile.n_block * Spec::kBlockN, 0, 0, hint);
      }
      ptx::warp_sync();
    }
  }
}

// Adds the sums of all segments of a consumer's tile, in the block that arrives last. Returns false in the other
// blocks, which only store theirs.
template <typename Spec>
__device__ __forceinline__ bool add_segments(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& shared,
                                             int consumer, const Piece& piece, int rows,
                                             float (&sums)[Spec::kAccumulators]) {
  constexpr int kSegmentSums = Spec::kAccumulators * 128;
  const int thread = ptx::thread_index() % 128;
  const int own = piece.index * Spec::kNumConsumers + consumer;
  float* own_gmem = params.partials + static_cast<int64_t>(own) * params.segments * kSegmentSums + thread * 4;
  // The shuffle tells the compiler that a warp's lanes stay together; otherwise it keeps neither the ring position nor
  // any descriptor in a uniform register (nor does it if a tile's number may come from an atomic).
  const bool has_rows = ptx::shuffle_index(thread / 32, 0) * 16 < rows;
  if (has_rows) {
#pragma unroll
    for (int i = 0; i < Spec::kAccumulators; i += 4) {
      const uint32_t words[4] = {ptx::float_bits(sums[i]), ptx::float_bits(sums[i + 1]), ptx::float_bits(sums[i + 2]),
                                 ptx::float_bits(sums[i + 3])};
      ptx::st_global_128(own_gmem + piece.first * kSegmentSums + i * 128, words);
    }
  }
  const ptx::SmemPointer answer_smem = shared.tile(consumer);
  sync_consumer(consumer);  // its sums are stored
  if (thread == 0) {
    int32_t* arrivals_gmem = params.arrivals + own;
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
      const float4 four = ptx::ld_global_float4(own_gmem + segment * kSegmentSums + i * 128);
      const float parts[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i + j] = segment == 0 ? parts[j] : sums[i + j] + parts[j];
    }
  }
  return true;
}

// A box of fewer than 64 rows leaves the rest of a stage unwritten: it is zeroed once, while the first boxes are in
// flight.
template <typename Spec>
__device__ __forceinline__ void clear_absent_rows(const LinearParams& params,
                                                  const moe::sm90::SharedMemory<Spec>& shared, int consumer) {
  constexpr uint32_t kZeros[4] = {0, 0, 0, 0};
  if (consumer > 0 || params.gemm.slots >= 64) return;
  for (int stage = 0; stage < Spec::kNumStages; ++stage) {
    const ptx::SmemPointer rows_smem(shared.a(stage));
    for (int chunk = params.gemm.slots * 8 + ptx::thread_index() % 128; chunk < 64 * 8; chunk += 128)
      ptx::st_shared_128(rows_smem + chunk * 16, kZeros);
  }
  ptx::fence_proxy_async_shared();
  sync_consumer(consumer);  // read after write: wgmma reads what other threads have cleared
}

template <typename Spec>
__device__ __forceinline__ void consume(const LinearParams& params, const moe::sm90::SharedMemory<Spec>& shared,
                                        int consumer, moe::sm90::PlainEpilogue<Spec> epilogue) {
  clear_absent_rows<Spec>(params, shared, consumer);
  moe::sm90::Mainloop<Spec, Weights::kNk> mainloop(shared, consumer);
  for (Pieces<Spec> pieces(params); pieces.has_next();) {
    const Piece piece = pieces.take();
    const auto blocks_of = [&](int segment) { return pieces.start(segment + 1) - pieces.start(segment); };
    const auto own = moe::sm90::warpgroup_tile<Spec>(piece.tile, consumer);
    if (own.rows <= 0) {
      mainloop.skip(pieces.start(piece.end) - pieces.start(piece.first));
      continue;
    }
    float sums[1][Spec::kAccumulators];
    mainloop.multiply(sums, blocks_of(piece.first), own.rows);
    if constexpr (Spec::kHasSegments) {
      for (int segment = piece.first + 1; segment < piece.end; ++segment) {
        float further[1][Spec::kAccumulators];
        mainloop.multiply(further, blocks_of(segment), own.rows);
#pragma unroll
        for (int i = 0; i < Spec::kAccumulators; ++i) sums[0][i] += further[0][i];
      }
      if (pieces.of_tile > 1 && !add_segments<Spec>(params, shared, consumer, piece, own.rows, sums[0])) continue;
    }
    epilogue.store(own, sums[0]);
  }
  epilogue.finish();
}

template <typename Spec, Weights kWeights>
__device__ __forceinline__ void linear(const LinearParams& params, const ptx::TensorMap& a_map,
                                       const ptx::TensorMap& b_map, const ptx::TensorMap& d_map) {
  static_assert(kWeights == Weights::kNk, "weights [n, k] alone");
  const moe::sm90::SharedMemory<Spec> shared{ptx::dynamic_shared_memory()};
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  if (warp == 0 && ptx::elect_one()) {
    ptx::prefetch_tensor_map(&a_map);
    ptx::prefetch_tensor_map(&b_map);
    ptx::prefetch_tensor_map(&d_map);
    moe::sm90::init_barriers(shared);
  }
  ptx::barrier_sync_block();
  ptx::grid_launch_dependents();
  ptx::grid_dependency_wait();
  if (warp < 4) {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    if (warp == 0) produce<Spec>(params, shared, a_map, b_map);
  } else {
    if constexpr (Spec::kMovesRegisters) ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    const int consumer = warp / 4 - 1;
    consume<Spec>(params, shared, consumer, moe::sm90::PlainEpilogue<Spec>(params.gemm, shared, consumer, d_map));
  }
}

}  // namespace flashmoe::linear::sm90
