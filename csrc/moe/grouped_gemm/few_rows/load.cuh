// Global to shared memory by cp.async, 16 bytes per thread. In shared memory 16 neighbouring weight rows
// (columns, in kn) are one fragment. With gate and up, a fragment is 8 rows of gate and the matching 8 of up, except in
// kn_pairs, where they stay interleaved because 16 bytes of memory are not split.
#pragma once

#include "device/swizzle.cuh"
#include "moe/grouped_gemm/few_rows/tiles.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "moe/params/gemm.h"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::few_rows {

// One thread's share of a tile's weights, from k = 0 upwards. Shared memory: nk [kBlockN, kBlockK], kn
// [kBlockK, kBlockN].
template <typename Spec, Weights kWeights, bool kIsGated>
struct WeightLoader {
  using Element = typename Spec::Element;
  static constexpr bool kIsNk = kWeights == Weights::kNk;
  static constexpr int kColumns = kIsNk ? Spec::kBlockK : Spec::kBlockN;  // of a row in shared memory
  static constexpr int kRows = kIsNk ? Spec::kBlockN : Spec::kBlockK;
  static constexpr int kPitch = kColumns * 2 + Spec::kPadding;
  static constexpr int kChunks = kColumns / kChunkElements;
  static constexpr int kRowsPerPass = Spec::kNumThreads / kChunks;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static_assert(kColumns % 64 == 0 && kRowsPerPass % kSegmentChunks == 0, "every pass swizzles the same way");
  static_assert(kRowsPerPass == 8 || kRowsPerPass % 16 == 0, "a pass is half a fragment or whole ones");

  const Element* next_gmem;  // this thread's chunk in pass 0 of the next stage
  int64_t stage_stride;      // elements
  int64_t pass_stride;       // nk: of 16 rows if a pass has 8
  int64_t half_stride;       // from the first 8 rows of a fragment to the other 8
  int left;                  // k that is left from that chunk on
  int valid;   // kn: whether the column exists; nk: how many of the tile's weight rows exist, from this one on
  int offset;  // of the chunk in shared memory

  __device__ __forceinline__ WeightLoader(const GemmParams& params, const Tile& tile)
      : WeightLoader(params, tile, params.k) {}

  // k: of the weights, in 16-bit elements.
  __device__ __forceinline__ WeightLoader(const GemmParams& params, const Tile& tile, int k) {
    const int chunk = ptx::thread_index() % kChunks;
    const int row = ptx::thread_index() / kChunks;
    const int tile_row = kIsNk ? row : chunk * kChunkElements;  // within the tile's weight rows
    const bool is_split = kIsGated && (kWeights == Weights::kKn || (kIsNk && params.is_interleaved == 0));
    const int64_t half = is_split ? params.n / 2 : kIsGated && kIsNk ? 1 : 8;  // weight rows
    const int fragment_rows = is_split ? 8 : 16;
    int64_t weight_row = tile.column + tile_row;
    if (is_split || (kIsGated && kIsNk)) {
      const int within = is_split ? tile_row % 8 : 2 * (tile_row % 8);
      weight_row = (is_split ? tile.column / 2 : tile.column) + tile_row / 16 * fragment_rows + within +
                   tile_row % 16 / 8 * half;
    }
    const Element* expert_gmem = static_cast<const Element*>(params.b) + tile.expert * params.b_expert_stride;
    next_gmem = kIsNk ? expert_gmem + weight_row * params.b_stride + chunk * kChunkElements
                      : expert_gmem + row * params.b_stride + weight_row;
    stage_stride = kIsNk ? Spec::kBlockK : Spec::kBlockK * params.b_stride;
    pass_stride = (kIsNk ? maximum(kRowsPerPass / 16, 1) * fragment_rows : kRowsPerPass) * params.b_stride;
    half_stride = half * params.b_stride;
    left = k - (kIsNk ? chunk * kChunkElements : row);
    valid = params.n - tile.column - tile_row;
    offset = Spec::kPadding == 0 ? swizzled_offset<kColumns>(row, chunk) : row * kPitch + chunk * kChunkBytes;
  }

  __device__ __forceinline__ void load(ptx::SmemPointer weights_smem) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool is_valid = kIsNk ? valid > pass * kRowsPerPass && left > 0 : valid > 0 && left > pass * kRowsPerPass;
      const int64_t distance =
          kIsNk && kRowsPerPass == 8 ? pass / 2 * pass_stride + pass % 2 * half_stride : pass * pass_stride;
      ptx::cp_async_16(weights_smem + (offset + pass * kRowsPerPass * kPitch), next_gmem + distance, is_valid ? 16 : 0);
    }
    advance();
  }

  __device__ __forceinline__ void advance() {
    next_gmem += stage_stride;
    left -= Spec::kBlockK;
  }
};

// One thread's share of a tile's rows of a, from k = 0 upwards, copied to [kBlockM, kBlockK]. Fills the groups of 8
// rows that are multiplied, with zeros past the last row.
template <typename Spec>
struct RowLoader {
  using Element = typename Spec::Element;
  static constexpr int kChunks = Spec::kBlockK / kChunkElements;
  static constexpr int kRowsPerPass = Spec::kNumThreads / kChunks;
  static constexpr int kPasses = (Spec::kBlockM + kRowsPerPass - 1) / kRowsPerPass;
  static_assert(kRowsPerPass % kSegmentChunks == 0, "every pass swizzles the same way");

  const Element* row_gmem[kPasses];  // this thread's chunk at k = 0
  int k = 0;                         // of the next stage
  int left;                          // k that is left from that chunk on
  int rows;                          // of the tile, from this thread's first one on
  int padded_rows;
  int offset;  // of the chunk in shared memory

  __device__ __forceinline__ RowLoader(const GemmParams& params, const Tile& tile) {
    const int chunk = ptx::thread_index() % kChunks;
    const int first = ptx::thread_index() / kChunks;
    rows = tile.rows - first;
    padded_rows = ceil_div(tile.rows, 8 * Spec::kGroupStep) * (8 * Spec::kGroupStep) - first;
    left = params.k - chunk * kChunkElements;
    offset = swizzled_offset<Spec::kBlockK>(first, chunk);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      row_gmem[pass] = static_cast<const Element*>(params.a) + chunk * kChunkElements;
      if (rows > pass * kRowsPerPass) {
        int row = tile.row + first + pass * kRowsPerPass;
        if (params.a_slots != nullptr)
          row = ptx::ld_global_32(params.a_slots + row) / static_cast<uint32_t>(params.top_k);
        row_gmem[pass] += row * params.a_stride;
      }
    }
  }

  __device__ __forceinline__ void load(ptx::SmemPointer rows_smem) {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      if (padded_rows > pass * kRowsPerPass)
        ptx::cp_async_16(rows_smem + (offset + pass * kRowsPerPass * (Spec::kBlockK * 2)), row_gmem[pass] + k,
                         rows > pass * kRowsPerPass && left > 0 ? 16 : 0);
    }
    k += Spec::kBlockK;
    left -= Spec::kBlockK;
  }
};

}  // namespace flashmoe::moe::few_rows
