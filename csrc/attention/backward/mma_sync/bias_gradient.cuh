// The gradient of an additive mask with mma.sync: a thread block sums up one tile of the mask (bias_items.cuh).
//
// Per item a warp computes S = Q K^T; dP = dO V^T; sum += P * (dP - row_dot). Two buffers, (Q, K) and (dO, V): one
// loads while the other is read.
#pragma once

#include "attention/backward/bias_items.cuh"
#include "attention/backward/mma_sync/dropout.cuh"
#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/score_mod.cuh"
#include "attention/backward/mma_sync/stream.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "attention/params/bias_gradient.h"

namespace flashmoe::attention::backward::mma_sync {

// The mask's values of a thread's scores, in shared memory: each thread reads only what it wrote.
// [pairs / 4][threads][16 bytes] for each 16 rows of the warp. There are not enough registers for them.
template <typename Spec>
struct KeptMask {
  ptx::SmemPointer thread_smem;

  __device__ __forceinline__ explicit KeptMask(ptx::SmemPointer smem)
      : thread_smem(smem + (Spec::kMaskOffset + ptx::thread_index() * 16)) {}

  __device__ __forceinline__ ptx::SmemPointer at(int m, int four) const {
    return thread_smem + (m * kScorePairs<Spec> / 4 + four) * Spec::kNumThreads * 16;
  }
  __device__ __forceinline__ void read(uint32_t (&values)[4], int m, int four) const {
    ptx::ld_shared_128(values, at(m, four));
  }
  __device__ __forceinline__ void load(const BackwardParams& params, const VarlenTile& tile, int row, int key) const {
    ScoreModWeights<Spec> score_mod;
    score_mod.load_mask(params, tile, tile.head, row, key);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int four = 0; four < kScorePairs<Spec> / 4; ++four) {
        const auto& values = score_mod.values[m];
        ptx::st_shared_128(at(m, four),
                           {values[4 * four], values[4 * four + 1], values[4 * four + 2], values[4 * four + 3]});
      }
  }
};

// smem: Q [kOwnRows, kHeadDim], dO, K [kStreamRows, kHeadDim], V, then the mask's values.
template <typename Spec, typename Stream>
__device__ __forceinline__ void bias_gradient(const BiasGradientParams& all) {
  using Element = typename Spec::Element;
  const BackwardParams& params = all.launched.backward;
  const ptx::SmemPointer smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer Q_smem = smem, dO_smem = smem + Spec::kOwnBytes;
  const ptx::SmemPointer K_smem = smem + Spec::kStreamOffset, V_smem = K_smem + Spec::kStreamBytes;
  const WarpCoordinates<Spec> warp(ptx::warp_index());
  const int group = heads_per_key_head(params);
  BiasItems<Spec> items(all, ptx::block_index());
  const auto tile_of = [&items] {
    return VarlenTile{items.item.batch, items.item.head, items.item.row, items.extents()};
  };

  const auto load = [&](bool is_first) {
    const VarlenTile tile = tile_of();
    const Strides& row_stride = is_first ? params.q_stride : params.dout_stride;
    const Strides& key_stride = is_first ? params.k_stride : params.v_stride;
    const int columns = is_first ? params.head_dim : params.head_dim_v;
    Stream::template copy<Spec::kOwnRows>(
        is_first ? Q_smem : dO_smem,
        static_cast<const Element*>(is_first ? params.q : params.dout) + row_offset(row_stride, tile, tile.head),
        row_stride.row, tile.row, params.seq_q, columns);
    Stream::template copy<Spec::kStreamRows>(
        is_first ? K_smem : V_smem,
        static_cast<const Element*>(is_first ? params.k : params.v) + key_offset(key_stride, tile, tile.head / group),
        key_stride.row, items.item.key, params.seq_k, columns);
    Stream::commit();
  };

  Scores<Spec> sums;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;

  const QueryOperand<Spec> Q(Q_smem + warp.first_row() * Spec::kRowBytes);
  const QueryOperand<Spec> dO(dO_smem + warp.first_row() * Spec::kRowBytes);
  TileDropout<Spec> dropout(params, tile_of());
  BiasStatistics<Spec> statistics;
  const KeptMask<Spec> mask(smem);
  const auto load_mask = [&] { mask.load(params, tile_of(), items.item.row + warp.first_row(), items.item.key); };
  if (items.left > 0) {
    load(true);
    statistics.load(params, items.item, items.item.row + warp.first_row());
    load_mask();
  }
  while (items.left > 0) {
    const BiasItem item = items.item;
    const int row = item.row + warp.first_row();
    Stream::wait();
    ptx::barrier_sync_block();  // Q and K have arrived; all warps are done with dO and V of the previous item
    load(false);
    Scores<Spec> scores;
    multiply_query_key<Spec>(scores, Q, K_smem);
    bias_weights<Spec>(params, scores, mask, statistics, items, row, item.key);
    const BiasStatistics<Spec> own = statistics;
    items.advance();
    Stream::wait();
    ptx::barrier_sync_block();  // dO and V have arrived; all warps are done with Q and K
    if (items.left > 0) {
      load(true);
      statistics.load(params, items.item, items.item.row + warp.first_row());
      if (all.folds_rows != 0 || all.folds_keys != 0) load_mask();  // otherwise the same for every item
    }
    Scores<Spec> gradients;
    multiply_query_key<Spec>(gradients, dO, V_smem);
    if constexpr (Spec::kHasDropout) {
      dropout.of_head.head = static_cast<uint32_t>(item.head);
      dropout.of_head.sequence = static_cast<uint32_t>(item.batch);
      dropout.drop(gradients, row, item.key);
    }
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = ptx::fma_rn(scores[m][n][i], gradients[m][n][i] - own.row_dot[m][i / 2], sums[m][n][i]);
        }
  }
  store_bias_gradient<Spec>(all, items, warp.first_row(), sums);
}

}  // namespace flashmoe::attention::backward::mma_sync
