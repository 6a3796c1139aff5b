// Grouped products of 16-bit rows with 4-bit weights, plain and gated, for sm_90a: schedule, rows and stores are those
// of the 16-bit products. The producer's four warps copy codes to shared memory, convert them to bf16 (../mxfp4.cuh)
// and write the stage of B that TMA would write. The alternative, weights in registers: wgmma takes only one operand
// from registers, which would be the rows of C^T, and its sums would then have neighbouring tokens instead of
// neighbouring columns.
//
// Each thread converts what it has copied itself, so a stage of codes is free once it has done so, and as many stages
// are in flight as shared memory holds.
// For a tile with at most 64 rows both consumers take these rows, with 128 of the weight rows each: with few rows per
// expert the weights are the bottleneck, and the tensor cores' time is halved. A row's bits depend only on k, as in
// mainloop.cuh.
#pragma once

#include "moe/grouped_gemm/mxfp4.cuh"
#include "moe/grouped_gemm/sm90/grouped_gemm_gated.cuh"
#include "moe/params/mxfp4.h"

namespace flashmoe::moe::sm90 {

// kAhead: stages of codes, in the bytes after the barriers.
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs, int kAhead_,
          bool kIsGated, bool kGathersA_>
struct Mxfp4Spec : TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, kIsGated, kGathersA_> {
  using Tile = TileSpec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, kIsGated, kGathersA_>;
  static constexpr int kAhead = kAhead_;
  static constexpr int kProducerWarps = 4;
  static constexpr int kProducerThreads = 32 * kProducerWarps;
  // Each producer thread's weights, plus its copies of rows or TMA's bytes of them.
  static constexpr int kFullArrivals = kProducerThreads + (kGathersA_ ? kProducerThreads : 1);
  static constexpr int kProducerRegisters = 120;
  static constexpr int kConsumerRegisters = 192;
  // Chunks of 16 bytes, the codes of one scale: two per row and stage.
  static constexpr int kPieces = kBlockN * 2 / kProducerThreads;  // per thread
  static constexpr int kCodesBytes = kBlockN * 32;                // per stage
  static constexpr int kCodesOffset = Tile::kSharedBytes;
  static constexpr int kCodesBarrierOffset = kCodesOffset + kAhead * kCodesBytes;
  static constexpr int kSharedBytes = kCodesBarrierOffset + kAhead * 8;
  static_assert(kCodesOffset % 16 == 0 && kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
  static_assert(kBlockM == 128 && kBlockN == 256,
                "a consumer has 64 rows and all columns, or all rows and 128 columns");
};

template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs, int kAhead>
using Mxfp4GemmSpec = Mxfp4Spec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, kAhead, false, false>;
template <typename Element, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kOutputSlabs, int kAhead>
using Mxfp4GatedGemmSpec =
    Mxfp4Spec<Element, kBlockM, kBlockN, kNumStages, kNumWarps, kOutputSlabs, kAhead, true, true>;

// The weight row for row `within` of the tile's B or, past the end, one that exists; is_there: whether it exists.
template <typename Spec>
__device__ __forceinline__ int weight_row(const GemmParams& params, const Tile& tile, int within, bool& is_valid) {
  const int column = tile.n_block * Spec::kOutputColumns;
  if constexpr (!Spec::kIsGated) {
    is_valid = column + within < params.n;
    return minimum(column + within, params.n - 1);
  }
  const int half = params.n / 2, is_up = within / 64 % 2;  // of 128 rows the first 64 are gate
  const int half_column = column + within / 128 * 64 + within % 64;
  is_valid = half_column < half;
  const int found = minimum(half_column, half - 1);
  return params.is_interleaved != 0 ? 2 * found + is_up : is_up * half + found;
}

// A thread's chunks of a tile's weights, one stage at a time: one of every 64 rows.
template <typename Spec>
struct Codes {
  const unsigned char* code_gmem[Spec::kPieces];
  const uint8_t* scale_gmem[Spec::kPieces];
  uint32_t valid;                     // bit i: the row of chunk i exists
  uint32_t scales[2][Spec::kPieces];  // of the next stage and the one after it
  int copied;                         // stages
  int blocks;                         // of k, each with a scale

  __device__ __forceinline__ void find(const Mxfp4GemmParams& params, const Tile& tile) {
    const GemmParams& gemm = params.gemm;
    const int chunk = ptx::thread_index() % 2;
    blocks = gemm.k / kMxfp4Block;
    valid = 0;
    copied = 0;
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) {
      bool is_valid;
      const int row = weight_row<Spec>(gemm, tile, ptx::thread_index() / 2 + 64 * i, is_valid);
      valid |= (is_valid ? 1u : 0u) << i;
      code_gmem[i] = static_cast<const unsigned char*>(gemm.b) +
                     (tile.expert * gemm.b_expert_stride + row * gemm.b_stride) * 2 + chunk * 16;
      scale_gmem[i] = params.b_scale + (static_cast<int64_t>(tile.expert) * gemm.n + row) * blocks;
    }
    load_scales(0, scales[0]);
    load_scales(1, scales[1]);
  }

  // Past the end of k, where codes are zeros, loads the last scale.
  __device__ __forceinline__ void load_scales(int stage, uint32_t (&to)[Spec::kPieces]) const {
    const int block = minimum(2 * stage + ptx::thread_index() % 2, blocks - 1);
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) to[i] = ptx::ld_global_8(scale_gmem[i] + block);
  }

  // Copies the next stage's codes to `codes_smem`, zeros past the end.
  __device__ __forceinline__ void copy(ptx::SmemPointer codes_smem) {
    const uint32_t present = 2 * copied + ptx::thread_index() % 2 < blocks ? valid : 0;
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) {
      ptx::cp_async_16(codes_smem + (i * Spec::kProducerThreads + ptx::thread_index()) * 16, code_gmem[i] + copied * 32,
                       (present >> i & 1) != 0 ? 16 : 0);
    }
    ++copied;
  }

  template <bool kIsLarge>
  __device__ __forceinline__ void convert(ptx::SmemPointer codes_smem, ptx::SmemPointer b_smem) const {
    const int chunk = ptx::thread_index() % 2, first_row = ptx::thread_index() / 2;
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) {
      uint32_t codes[4];
      ptx::ld_shared_128(codes, codes_smem + (i * Spec::kProducerThreads + ptx::thread_index()) * 16);
      const Mxfp4Scale<kIsLarge> scale(scales[0][i]);
      const ptx::SmemPointer row_smem = b_smem + (first_row + 64 * i) * kSlabRowBytes;
#pragma unroll
      for (int eight = 0; eight < 4; ++eight) {
        uint32_t pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) pairs[j] = scale.apply(spread_neighbours(codes[eight], codes[eight] << 4, j));
        ptx::st_shared_128(row_smem + ((4 * chunk + eight) ^ first_row % 8) * 16, pairs);
      }
    }
  }

  // Writes the next stage of B.
  __device__ __forceinline__ void write(int stage, ptx::SmemPointer codes_smem, ptx::SmemPointer b_smem) {
    bool is_large = false;
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) is_large = is_large || has_large_scale(scales[0][i]);
    if (ptx::vote_ballot(is_large) != 0) {
      convert<true>(codes_smem, b_smem);
    } else {
      convert<false>(codes_smem, b_smem);
    }
#pragma unroll
    for (int i = 0; i < Spec::kPieces; ++i) scales[0][i] = scales[1][i];
    load_scales(stage + 2, scales[1]);
  }
};

// Completes when a stage of codes has arrived.
template <typename Spec>
__device__ __forceinline__ ptx::Mbarrier* codes_full(const SharedMemory<Spec>& smem, int stage) {
  return reinterpret_cast<ptx::Mbarrier*>(smem.base + Spec::kCodesBarrierOffset) + stage;
}

// The work of each producer warp for a tile.
template <typename Spec>
struct Mxfp4Loads {
  const Mxfp4GemmParams& params;
  const SharedMemory<Spec> smem;
  const ptx::TensorMap* a_map;  // null if rows are gathered
  RingPosition<Spec::kNumStages> state;
  RingPosition<Spec::kAhead> filled, next;  // of codes: where copies go, and where the next stage's are

  __device__ __forceinline__ ptx::SmemPointer codes(int stage) const {
    return ptx::SmemPointer(smem.base + Spec::kCodesOffset + stage * Spec::kCodesBytes);
  }

  __device__ __forceinline__ void copy(Codes<Spec>& weights) {
    weights.copy(codes(filled.stage));
    ptx::mbarrier_arrive_cp_async(codes_full(smem, filled.stage));
    filled.advance();
  }

  __device__ __forceinline__ void operator()(const Tile& tile, int warp) {
    const GemmParams& gemm = params.gemm;
    const bool is_issuer = warp == 0 && ptx::lane_index() == 0;
    GatheredRows<Spec> rows;
    if constexpr (Spec::kGathersA) rows.find(gemm, tile);
    Codes<Spec> weights;
    weights.find(params, tile);
    const int stages = ceil_div(gemm.k, Spec::kBlockK);
    for (int ahead = 0; ahead < minimum(Spec::kAhead - 1, stages); ++ahead) copy(weights);
    for (int k = 0; k < gemm.k; k += Spec::kBlockK, state.advance()) {
      ptx::Mbarrier* full = smem.full(state.stage);
      ptx::mbarrier_wait(smem.empty(state.stage), state.parity ^ 1);
      if constexpr (Spec::kGathersA) {
        rows.copy(gemm, smem.a(state.stage), k);
        ptx::mbarrier_arrive_cp_async(full);  // before the codes' copies, or it would wait for them, too
      } else if (is_issuer) {
        ptx::mbarrier_arrive_expect_tx(full, Spec::kABytes);
        load_rows<Spec>(smem.a(state.stage), *a_map, full, tile, k);
      }
      if (weights.copied < stages) copy(weights);
      ptx::mbarrier_wait(codes_full(smem, next.stage), next.parity);
      weights.write(k / Spec::kBlockK, codes(next.stage), ptx::SmemPointer(smem.b(state.stage)));
      next.advance();
      ptx::fence_proxy_async_shared();  // wgmma reads what this thread has written
      ptx::mbarrier_arrive(full);
    }
  }
};

template <typename Spec>
struct Mxfp4Mainloop {
  Mainloop<Spec, Weights::kNk> mainloop;

  __device__ __forceinline__ Mxfp4Mainloop(const SharedMemory<Spec>& smem, int consumer) : mainloop(smem, consumer) {}

  // Four products of the 64 rows of `slab` with kHalves * 128 columns, from half `first_half` on.
  template <int kHalves>
  __device__ __forceinline__ void issue(float (&accum)[kHalves * 64], int slab, int first_half, bool is_first) const {
    const int stage = mainloop.state.stage;
    const auto a = typename Spec::ATile{mainloop.smem.a(stage) + slab * Spec::kSlabBytes}.k_major();
    const auto b =
        SharedTile<kHalves * 128, Spec::kBlockK>{mainloop.smem.b(stage) + first_half * (Spec::kBBytes / 2)}.k_major();
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kBlockK / 16; ++step)
      ptx::wgmma_ss<typename Spec::Element, kHalves * 128, false>(accum, a.k_step(step), b.k_step(step),
                                                                  step == 0 && is_first ? 0 : 1);
    ptx::wgmma_commit();
  }

  // See Mainloop::multiply.
  template <int kHalves>
  __device__ __forceinline__ void multiply(float (&accum)[kHalves * 64], int slab, int first_half, int blocks) {
    mainloop.wait_full();
    issue<kHalves>(accum, slab, first_half, true);
    int before = mainloop.state.stage;
    mainloop.state.advance();
    for (int block = 1; block < blocks; ++block) {
      mainloop.wait_full();
      issue<kHalves>(accum, slab, first_half, false);
      ptx::wgmma_wait<1>();
      mainloop.release(before);
      before = mainloop.state.stage;
      mainloop.state.advance();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operands(accum);
    mainloop.release(before);
  }
};

template <typename Spec, typename Epilogue>
__device__ __forceinline__ void consume_mxfp4(const GemmParams& params, const SharedMemory<Spec>& smem, int consumer,
                                              Epilogue epilogue) {
  const int blocks = ceil_div(params.k, Spec::kBlockK);
  Mxfp4Mainloop<Spec> mainloop(smem, consumer);
  RingPosition<Spec::kNumTileSlots> tile_state;
  while (true) {
    const Tile tile = next_tile<Spec>(smem, tile_state);
    if (tile.expert < 0) break;
    if (tile.end_row - tile.first_row <= 64) {
      WarpgroupTile<Spec> wg_tile = warpgroup_tile<Spec>(tile, 0);
      wg_tile.column += consumer * (Spec::kOutputColumns / 2);
      float accum[Spec::kAccumulators / 2];
      mainloop.template multiply<1>(accum, 0, consumer, blocks);
      epilogue.store(wg_tile, accum);
    } else {
      float accum[Spec::kAccumulators];
      mainloop.template multiply<2>(accum, consumer, 0, blocks);
      epilogue.store(warpgroup_tile<Spec>(tile, consumer), accum);
    }
  }
  epilogue.finish();
}

// See run_grouped_gemm. Epilogue: constructed from (params, smem, consumer, maps...).
template <typename Spec, typename Epilogue, typename... Maps>
__device__ __forceinline__ void run_mxfp4(const Mxfp4GemmParams& params, const ptx::TensorMap* a_map,
                                          const Maps&... maps) {
  const SharedMemory<Spec> smem{ptx::dynamic_shared_memory()};
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;

  if (warp == 0 && ptx::elect_one()) {
    if constexpr (!Spec::kGathersA) ptx::prefetch_tensor_map(a_map);
    (ptx::prefetch_tensor_map(&maps), ...);
#pragma unroll
    for (int stage = 0; stage < Spec::kAhead; ++stage)
      ptx::mbarrier_init(codes_full(smem, stage), Spec::kProducerThreads);
    init_barriers(smem);
  }
  ptx::barrier_sync_block();
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();

  if (warpgroup == 0) {
    ptx::setmaxnreg_dec<Spec::kProducerRegisters>();
    Mxfp4Loads<Spec> loads{params, smem, a_map, {}, {}, {}};
    produce<Spec>(params.gemm, smem, warp, loads);
  } else {
    ptx::setmaxnreg_inc<Spec::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    consume_mxfp4<Spec>(params.gemm, smem, consumer, Epilogue(params.gemm, smem, consumer, maps...));
  }
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_mxfp4(const Mxfp4GemmParams& params, const ptx::TensorMap& a_map,
                                                   const ptx::TensorMap& d_map) {
  run_mxfp4<Spec, PlainEpilogue<Spec>>(params, &a_map, d_map);
}

// No preactivation is requested, so its map is never used.
template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_mxfp4(const Mxfp4GemmParams& params, const ptx::TensorMap& d_map) {
  run_mxfp4<Spec, GatedEpilogue<Spec, Weights::kNk>>(params, nullptr, d_map, d_map);
}

}  // namespace flashmoe::moe::sm90
