// Softcap and mask tensors (../score_mod.cuh) for a warp with 16 * kMmaM rows.
#pragma once

#include "attention/backward/score_mod.cuh"
#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/tile.cuh"

namespace flashmoe::attention::backward::mma_sync {

// A mask tensor's values for a warp's scores of one block. Empty without score modification.
template <typename Spec, bool kHasScoreMod = Spec::kHasScoreMod>
struct ScoreModWeights {};

template <typename Spec>
struct ScoreModWeights<Spec, true> {
  MaskValues<Spec> values[Spec::kMmaM];

  // own: the warp's first row, or key, in the sequence; first: that of the block.
  __device__ __forceinline__ void load_mask(const BackwardParams& params, const VarlenTile& tile, int head, int own,
                                            int first) {
    const ScoreOptions& options = params.score_options;
    const int lane = ptx::lane_index();
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      backward::load_mask<Spec>(values[m], options, [&] {
        const int row = own + m * 16 + lane / 4;
        const int column = first + lane % 4 * 2;
        return Spec::kHasStatistics
                   ? MaskSource<Spec>(options, tile.batch, head, options.mask_stride_key, options.mask_stride_row, row,
                                      tile.extents.keys(), column, tile.extents.rows())
                   : MaskSource<Spec>(options, tile.batch, head, options.mask_stride_row, options.mask_stride_key, row,
                                      tile.extents.rows(), column, tile.extents.keys());
      });
    }
  }

  // dq: turns scores into P times the derivative of the softcap.
  __device__ __forceinline__ void weigh_keys(const BackwardParams& params, Scores<Spec>& scores,
                                             const float (&lse_log2)[Spec::kMmaM][2], const VarlenTile& tile, int row,
                                             int first_key) const {
    const auto keys_of = [&](int own_row) { return visible_keys<MaskKind::kRuntime>(params, tile.extents, own_row); };
    const bool sees_all =
        keys_of(row).end - first_key >= Spec::kStreamRows && keys_of(row + Spec::kWarpRows - 1).begin <= first_key;
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      uint32_t unused[kScorePairs<Spec>];
      apply_softmax<false>(
          params, scores, m, unused, sees_all, row, first_key, [&](int i) { return lse_log2[m][i / 2 % 2]; }, keys_of);
    }
  }

  // dk and dv: the same for S^T; operand gets P^T without the derivative. lse_log2: of the thread's columns.
  __device__ __forceinline__ void apply_softmax_rows(const BackwardParams& params, Scores<Spec>& scores,
                                                     Operand<Spec>& operand, const float (&lse_log2)[Spec::kMmaN][2],
                                                     const VarlenTile& tile, int key, int first_row) const {
    const auto rows_of = [&](int own_key) { return visible_rows<MaskKind::kRuntime>(params, tile.extents, own_key); };
    const bool sees_all = key + Spec::kWarpRows <= tile.extents.keys() &&
                          rows_of(key + Spec::kWarpRows - 1).begin <= first_row &&
                          rows_of(key).end >= first_row + Spec::kStreamRows;
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      uint32_t packed[kScorePairs<Spec>];
      apply_softmax<true>(
          params, scores, m, packed, sees_all, key, first_row, [&](int i) { return lse_log2[i / 4][i % 2]; }, rows_of);
#pragma unroll
      for (int i = 0; i < kScorePairs<Spec>; ++i) operand[i / 4][m][i % 4] = packed[i];
    }
  }

 private:
  // see(row): the columns of the sequence that a row of the scores sees.
  template <bool kPacks, typename LseLog2, typename See>
  __device__ __forceinline__ void apply_softmax(const BackwardParams& params, Scores<Spec>& scores, int m,
                                                uint32_t (&packed)[kScorePairs<Spec>], bool sees_all, int own,
                                                int first, LseLog2 lse_log2, See see) const {
    float of_rows[2 * kScorePairs<Spec>];
#pragma unroll
    for (int i = 0; i < 2 * kScorePairs<Spec>; ++i) of_rows[i] = scores[m][i / 4][i % 4];
    weigh_with_score_mod<Spec, kPacks>(params, of_rows, packed, values[m],
                                       sees_all && has_plain_blocks<Spec>(params.score_options), lse_log2,
                                       [&](KeyRange(&visible)[2]) {
                                         const int lane = ptx::lane_index();
                                         const int column = first + lane % 4 * 2;
#pragma unroll
                                         for (int half = 0; half < 2; ++half) {
                                           const KeyRange range = see(own + m * 16 + half * 8 + lane / 4);
                                           visible[half] = KeyRange{range.begin - column, range.end - column};
                                         }
                                       });
#pragma unroll
    for (int i = 0; i < 2 * kScorePairs<Spec>; ++i) scores[m][i / 4][i % 4] = of_rows[i];
  }
};

}  // namespace flashmoe::attention::backward::mma_sync
