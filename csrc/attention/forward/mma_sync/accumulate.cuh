// What a warp does with the scores of one key tile: mask, online softmax, O += P V.
#pragma once

#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/masks.cuh"
#include "attention/scores.cuh"
#include "ptx/math.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace mma_sync {

// What a warp carries from key tile to key tile.
template <typename Spec>
struct Accumulator {
  float O_rmem[Spec::kMmaM][Spec::kMmaD][4];  // [kWarpRows, kHeadDim], not yet divided by the row sums
  RowState rows[Spec::kMmaM][2];

  __device__ __forceinline__ Accumulator() {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) O_rmem[m][d][i] = 0.0f;
  }
};

// Scores of columns that a row does not see become -inf.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void mask_scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], int lane,
                                            TileMask<kMask> mask) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      const int last_column = mask.last_column(row) - lane % 4 * 2;  // from this thread's first
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i > last_column) S_rmem[m][n][2 * half + i] = ptx::negative_infinity();
      if constexpr (kMask == MaskKind::kRuntime) {
        const int first_column = mask.first_column(row) - lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i < first_column) S_rmem[m][n][2 * half + i] = ptx::negative_infinity();
      }
    }
}

// Softcap and mask tensor of ScoreOptions, before mask_scores; first_row: the warp's, of the sequence.
template <typename Spec>
__device__ __forceinline__ void shape_scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4],
                                             const Sequence<MaskKind::kRuntime>& sequence, int head_q, int first_row,
                                             int first_key) {
  const ScoreOptions& options = sequence.params.score_options;
  if (options.score_factor > 0.0f) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = capped_score(options, S_rmem[m][n][i]);
  }
  if (options.mask == nullptr) return;
  const int lane = ptx::recompute(ptx::lane_index());
  const int64_t head = sequence.batch * options.mask_stride_batch + head_q * options.mask_stride_head;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8 + lane / 4;
      if (row >= sequence.rows()) continue;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + n * 8 + lane % 4 * 2 + i;
          float& score = S_rmem[m][n][2 * half + i];
          if (key < sequence.keys()) {
            score = masked_score<typename Spec::Element>(
                options, score, head + row * options.mask_stride_row + key * options.mask_stride_key);
          }
        }
    }
}

// Folds the tile's scores into the running maxima and sums, rescales O, and adds P V. The exponentials of 16 keys are
// taken just before their product, so that the two can overlap.
template <typename Spec>
__device__ __forceinline__ void accumulate_tile(Accumulator<Spec>& accumulator,
                                                float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], ptx::SmemPointer V_smem,
                                                float scale_log2, bool is_masked) {
  float shift[Spec::kMmaM][2];
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tile_max = ptx::negative_infinity();
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        tile_max = ptx::max_ftz(tile_max, S_rmem[m][n][2 * half]);
        tile_max = ptx::max_ftz(tile_max, S_rmem[m][n][2 * half + 1]);
      }
      const float rescale =
          advance_max(accumulator.rows[m][half], tile_max, scale_log2, /*may_be_empty=*/is_masked, shift[m][half]);
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        accumulator.O_rmem[m][d][2 * half] *= rescale;
        accumulator.O_rmem[m][d][2 * half + 1] *= rescale;
      }
    }
  const auto V_walk = rows_first_walk<Spec>(V_smem);
#pragma unroll
  for (int k = 0; k < Spec::kBlockN / 16; ++k) {
    uint32_t P_rmem[Spec::kMmaM][4];
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = ptx::exp2_approx(ptx::fma_rn(S_rmem[m][n][i], scale_log2, -shift[m][i / 2]));
          S_rmem[m][n][i] = p;
          accumulator.rows[m][i / 2].sum += p;
        }
      probability_operand<Spec>(P_rmem[m], S_rmem[m][2 * k], S_rmem[m][2 * k + 1]);
    }
    multiply_probability_value<Spec>(accumulator.O_rmem, P_rmem, V_walk, k);
  }
}

}  // namespace mma_sync
}  // namespace attention
}  // namespace flashmoe
