// Products of 16-bit rows with 4-bit weights, for few rows per expert. A lane makes its operands from whole words of a
// weight row, each of eight codes, of which it uses two. Which two is free within the eight, as long as the rows of `a`
// use the same two: codes t and t + 4, at the same position of the word's two halves, are one shift away. So rows are
// stored to shared memory with the columns of each eight in the order 0 4 1 5 2 6 3 7. The sums are those of 16-bit
// weights, because tensor cores add at least eight products at once.
#pragma once

#include "moe/grouped_gemm/few_rows/stream.cuh"
#include "moe/grouped_gemm/mxfp4.cuh"
#include "moe/params/mxfp4.h"
#include "ptx/shuffle.cuh"

namespace flashmoe::moe::few_rows {

// To the loaders, a row's kBlockK weights are kBlockK / 4 elements of two bytes.
template <typename Element, int kBlockM, int kBlockN, int kNumStages_, int kNumWarps, int kBlockK_>
struct Mxfp4Spec : Spec<Element, kBlockM, kBlockN, kNumStages_, kNumWarps, kBlockK_> {
  // Rows are padded by 16 bytes: as free of bank conflicts as a swizzle, whose addresses would have to be computed.
  static constexpr int kPadding = 16;
  struct Packed : Spec<Element, kBlockM, kBlockN, kNumStages_, kNumWarps, kBlockK_ / 4> {
    static constexpr int kPadding = Mxfp4Spec::kPadding;
  };
  static constexpr int kWeightPitch = kBlockK_ / 2 + kPadding;  // bytes
  static constexpr int kRowPitch = kBlockK_ * 2 + kPadding;
  static constexpr int kWeightBytes = kBlockN * kWeightPitch;
  static constexpr int kStageBytes = kWeightBytes + kBlockM * kRowPitch;
  static constexpr int kSharedBytes = kNumStages_ * kStageBytes + Packed::kListBytes + Packed::kWordBytes +
                                      kNumWarps * kBlockM * (16 * Packed::kFragments + 4) * 4;
};

// The weight row for row `within` of the tile; past the end, a row that exists.
template <bool kIsGated>
__device__ __forceinline__ int weight_row(const GemmParams& params, const Tile& tile, int within) {
  if constexpr (!kIsGated) return minimum(tile.column + within, params.n - 1);
  const int half = params.n / 2;
  const int half_column = minimum(tile.column / 2 + within / 16 * 8 + within % 8, half - 1);
  const int is_up = within / 8 % 2;
  return params.is_interleaved != 0 ? 2 * half_column + is_up : is_up * half + half_column;
}

// The scales of a warp's weight rows, one stage at a time. For rows lane / 4 and lane / 4 + 8 of each fragment a lane
// holds the scales of two blocks, for the four lanes that share the rows.
template <typename Spec, bool kIsGated>
struct Mxfp4Scales {
  static constexpr int kBlocks = Spec::kBlockK / kMxfp4Block;  // per stage
  static_assert(kBlocks == 8, "two per lane");

  const uint8_t* row_gmem[Spec::kFragments][2];
  int blocks;                                    // of k
  uint32_t lane_scales[Spec::kFragments][2][2];  // [row][block], one byte each

  __device__ __forceinline__ Mxfp4Scales(const Mxfp4GemmParams& params, const Tile& tile)
      : blocks(params.gemm.k / kMxfp4Block) {
#pragma unroll
    for (int i = 0; i < Spec::kFragments; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int within = (ptx::warp_index() * Spec::kFragments + i) * 16 + half * 8 + ptx::lane_index() / 4;
        const int64_t row =
            static_cast<int64_t>(tile.expert) * params.gemm.n + weight_row<kIsGated>(params.gemm, tile, within);
        row_gmem[i][half] = params.b_scale + row * blocks;
      }
  }

  // Past the last block of k, where both operands are zeros, loads the last block's scale.
  __device__ __forceinline__ void load(int stage) {
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const int k_block = minimum(stage * kBlocks + ptx::lane_index() % 4 * 2 + b, blocks - 1);
#pragma unroll
      for (int i = 0; i < Spec::kFragments; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) lane_scales[i][half][b] = ptx::ld_global_8(row_gmem[i][half] + k_block);
    }
  }

  // Bytes: the first row's two blocks, then the second's.
  __device__ __forceinline__ uint32_t word(int fragment) const {
    const uint32_t (&of)[2][2] = lane_scales[fragment];
    return of[0][0] | of[0][1] << 8 | of[1][0] << 16 | of[1][1] << 24;
  }
};

// A thread's share of a tile's rows of a, permuted as above, from k = 0 upwards, copied to [kBlockM, kBlockK]. They
// pass through registers: a stage's rows are requested with its weights and stored one step later.
template <typename Spec>
struct PermutedRows {
  using Element = typename Spec::Element;
  static constexpr int kChunks = Spec::kBlockK / kChunkElements;
  static constexpr int kPasses = Spec::kBlockM * kChunks / Spec::kNumThreads;
  static_assert(kPasses * Spec::kNumThreads == Spec::kBlockM * kChunks && Spec::kNumThreads % kChunks == 0,
                "a thread's chunks are of one column");

  struct Pending {
    uint32_t words[kPasses][4];
    ptx::SmemPointer rows_smem;  // where to store them
    int count = 0;

    __device__ __forceinline__ void store() {
      if (count == 0) return;
      const int chunk = ptx::thread_index() % kChunks;
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        if (pass >= count) break;
        const int row = ptx::thread_index() / kChunks + pass * (Spec::kNumThreads / kChunks);
        const uint32_t (&from)[4] = words[pass];
        const uint32_t to[4] = {(from[0] & 0xFFFFu) | from[2] << 16, from[0] >> 16 | (from[2] & 0xFFFF0000u),
                                (from[1] & 0xFFFFu) | from[3] << 16, from[1] >> 16 | (from[3] & 0xFFFF0000u)};
        ptx::st_shared_128(rows_smem + (row * Spec::kRowPitch + chunk * kChunkBytes), to);
      }
      count = 0;
    }
  };

  const Element* row_gmem[kPasses];  // this thread's chunk at k = 0
  int k = 0;                         // of the next stage
  int left;                          // k that is left from that chunk on
  int rows;                          // of the tile, from this thread's first one on
  int passes;                        // that fill the groups of 8 rows that are multiplied

  __device__ __forceinline__ PermutedRows(const GemmParams& params, const Tile& tile) {
    constexpr int kRowsPerPass = Spec::kNumThreads / kChunks;
    const int first = ptx::thread_index() / kChunks;
    const int column = ptx::thread_index() % kChunks * kChunkElements;
    rows = tile.rows - first;
    left = params.k - column;
    passes = ceil_div(ceil_div(tile.rows, 8 * Spec::kGroupStep) * (8 * Spec::kGroupStep), kRowsPerPass);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      row_gmem[pass] = static_cast<const Element*>(params.a) + column;
      if (rows > pass * kRowsPerPass) {
        int row = tile.row + first + pass * kRowsPerPass;
        if (params.a_slots != nullptr)
          row = ptx::ld_global_32(params.a_slots + row) / static_cast<uint32_t>(params.top_k);
        row_gmem[pass] += row * params.a_stride;
      }
    }
  }

  // Requests the next stage's rows, to be stored at rows_smem.
  __device__ __forceinline__ void request(Pending& pending, ptx::SmemPointer rows_smem) {
    constexpr int kRowsPerPass = Spec::kNumThreads / kChunks;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int i = 0; i < 4; ++i) pending.words[pass][i] = 0;
      if (rows > pass * kRowsPerPass && left > 0) ptx::ld_global_128(pending.words[pass], row_gmem[pass] + k);
    }
    pending.rows_smem = rows_smem;
    pending.count = passes;
    k += Spec::kBlockK;
    left -= Spec::kBlockK;
  }

  __device__ __forceinline__ void load(ptx::SmemPointer rows_smem) {
    Pending pending;
    request(pending, rows_smem);
    pending.store();
  }
};

template <typename Spec, bool kIsGated>
struct Mxfp4Work {
  using Params = Mxfp4GemmParams;
  using WeightLoads = WeightLoader<typename Spec::Packed, Weights::kNk, kIsGated>;
  using Rows = PermutedRows<Spec>;
  using Pending = typename Rows::Pending;
  // Rows are stored between two barriers, ahead of the step that reads them.
  static_assert(Spec::kNumStages >= 3, "a stage's rows are stored a step after its weights are requested");

  Tile tile;
  WeightLoads weights;
  Rows rows;
  Mxfp4Scales<Spec, kIsGated> scales;
  int issued = 0;  // stages

  __device__ __forceinline__ Mxfp4Work(const Mxfp4GemmParams& params, const Tile& tile_)
      : tile(tile_), weights(weight_loads(params.gemm, tile_)), rows(params.gemm, tile_), scales(params, tile_) {}

  static __device__ __forceinline__ WeightLoads weight_loads(const GemmParams& params, const Tile& tile) {
    return WeightLoads(params, tile, params.k / 4);
  }

  __device__ __forceinline__ void load(ptx::SmemPointer stage_smem, Pending& pending) {
    pending.store();  // from another load of this step
    weights.load(stage_smem);
    rows.request(pending, stage_smem + Spec::kWeightBytes);
    ++issued;
  }

  // A block of 32 k: the warp's fragments of weights as A operands, with kGroups groups of 8 rows. words: the scales of
  // the block and its neighbour.
  template <bool kIsLarge, int kGroups>
  static __device__ __forceinline__ void multiply_block(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem,
                                                        int block, const uint32_t (&words)[Spec::kFragments]) {
    const int lane = ptx::lane_index();
    const uint32_t multiplier = 4096u >> (4 * (lane % 4));  // a shift by 12, 8, 4 or 0
    uint32_t a[Spec::kFragments][2][4];
#pragma unroll
    for (int i = 0; i < Spec::kFragments; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = (ptx::warp_index() * Spec::kFragments + i) * 16 + 8 * half + lane / 4;
        uint32_t codes[4];
        ptx::ld_shared_128(codes, stage_smem + (row * Spec::kWeightPitch + block * kChunkBytes));
        const uint32_t byte = static_cast<uint32_t>(2 * half + block % 2);
        const Mxfp4Scale<kIsLarge> scale(ptx::permute_bytes(words[i], 0, 0x4440u + byte));
#pragma unroll
        for (int eight = 0; eight < 4; ++eight)
          a[i][eight / 2][eight % 2 * 2 + half] = scale.apply(spread_codes(codes[eight] * multiplier));
      }
    }
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      uint32_t b[4];  // matrix i: the group's rows, k 8 * i to 8 * i + 7 of the block
      ptx::ldmatrix_x4(b, stage_smem + Spec::kWeightBytes +
                              ((8 * group + lane % 8) * Spec::kRowPitch + (4 * block + lane / 8) * kChunkBytes));
#pragma unroll
      for (int step = 0; step < 2; ++step)
#pragma unroll
        for (int i = 0; i < Spec::kFragments; ++i)
          ptx::mma_m16n8k16<typename Spec::Element>(accumulator[i][group], a[i][step], b[2 * step], b[2 * step + 1]);
    }
  }

  template <bool kIsLarge, int kGroups = Spec::kGroups>
  __device__ __forceinline__ void multiply_stage(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem,
                                                 const uint32_t (&scale_words)[Spec::kFragments]) const {
    constexpr int kFewer = kGroups - Spec::kGroupStep;
    if constexpr (kFewer > 0) {
      if (tile.rows <= 8 * kFewer) return multiply_stage<kIsLarge, kFewer>(accumulator, stage_smem, scale_words);
    }
#pragma unroll
    for (int block = 0; block < Spec::kBlockK / kMxfp4Block; ++block) {
      uint32_t words[Spec::kFragments];
#pragma unroll
      for (int i = 0; i < Spec::kFragments; ++i)
        words[i] = ptx::shuffle_index(static_cast<int>(scale_words[i]), (ptx::lane_index() & ~3) + block / 2);
      multiply_block<kIsLarge, kGroups>(accumulator, stage_smem, block, words);
    }
  }

  __device__ __forceinline__ void multiply(Accumulator<Spec>& accumulator, ptx::SmemPointer stage_smem, int step,
                                           int stages) {
    uint32_t scale_words[Spec::kFragments];
    bool is_large = false;
#pragma unroll
    for (int i = 0; i < Spec::kFragments; ++i) {
      scale_words[i] = scales.word(i);
      is_large = is_large || has_large_scale(scale_words[i]);
    }
    if (step + 1 < stages) scales.load(step + 1);
    if (ptx::vote_ballot(is_large) != 0) {
      multiply_stage<true>(accumulator, stage_smem, scale_words);
    } else {
      multiply_stage<false>(accumulator, stage_smem, scale_words);
    }
  }

  __device__ __forceinline__ void store(const GemmParams& params, const WarpSums<Spec>& sums) const {
    if constexpr (kIsGated) {
      with_activation(params.activation,
                      [&](auto activation) { store_gated<Spec, Weights::kNk>(params, tile, sums, activation); });
    } else {
      store_plain<Spec>(params, tile, sums);
    }
  }
};

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_mxfp4(const Mxfp4GemmParams& params) {
  stream_tiles<Spec, false, Mxfp4Work<Spec, false>>(params);
}

template <typename Spec>
__device__ __forceinline__ void grouped_gemm_gated_mxfp4(const Mxfp4GemmParams& params) {
  stream_tiles<Spec, true, Mxfp4Work<Spec, true>>(params);
}

}  // namespace flashmoe::moe::few_rows
