// The gradient of an additive mask. A thread block owns a tile of the mask, kOwnRows rows and kStreamRows keys of one of its matrices, and
// visits the tiles of the scores that share it, its items, in ascending order: batch by batch, head by head, and where the mask has one
// row, or one key, row tile by row tile, or key tile by key tile. Nobody else adds to the tile, so that its bits are the same on every run.
//
// A warp's item: S = Q K^T; dP = dO V^T; sum += P * (dP - row_dot). Two buffers, (Q, K) and (dO, V): one loads while the other is read.
#pragma once

#include "attention/backward/mma_sync/dropout.cuh"
#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/score_mod.cuh"
#include "attention/backward/mma_sync/stream.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "attention/params/bias_gradient.h"

namespace flashmoe {
namespace attention {
namespace backward {
namespace mma_sync {

// A tile of the scores: rows of a query head, and the first key.
struct BiasItem {
  VarlenTile tile;
  int key;
};

// The items of this thread block, by number.
template <typename Spec>
struct BiasItems {
  const BackwardParams& params;
  const BiasGradientParams& all;
  int row_tile;  // of the mask; 0 where rows are folded
  int key_tile;
  int head;
  int batch;
  int split;
  int end;  // of the numbers of this block

  __device__ __forceinline__ explicit BiasItems(const BiasGradientParams& all_)
      : params(all_.launched.backward), all(all_) {
    int index = ptx::block_index();
    const auto take = [&](int count) {
      const int taken = index % count;
      index /= count;
      return taken;
    };
    row_tile = take(all.folds_rows != 0 ? 1 : row_tiles());
    key_tile = take(all.folds_keys != 0 ? 1 : key_tiles());
    head = take(all.heads);
    batch = take(all.batches);
    split = index;
    end = first_of(split + 1);
  }

  __device__ __forceinline__ int row_tiles() const { return ceil_div(params.seq_q, Spec::kOwnRows); }
  __device__ __forceinline__ int key_tiles() const { return ceil_div(params.seq_k, Spec::kStreamRows); }
  // Of all splits.
  __device__ __forceinline__ int64_t count() const {
    return static_cast<int64_t>(params.batch / all.batches) * (params.heads_q / all.heads) *
           (all.folds_rows != 0 ? row_tiles() : 1) * (all.folds_keys != 0 ? key_tiles() : 1);
  }
  __device__ __forceinline__ int first_of(int of_split) const {
    return static_cast<int>(count() * of_split / all.splits);
  }

  __device__ __forceinline__ BiasItem at(int number) const {
    const auto take = [&](bool is_shared, int tiles, int own) {
      if (!is_shared) return own;
      const int taken = number % tiles;
      number /= tiles;
      return taken;
    };
    BiasItem item;
    item.key = take(all.folds_keys != 0, key_tiles(), key_tile) * Spec::kStreamRows;
    item.tile.row = take(all.folds_rows != 0, row_tiles(), row_tile) * Spec::kOwnRows;
    item.tile.head = take(all.heads == 1, params.heads_q, head);
    item.tile.batch = all.batches == 1 ? number : batch;
    item.tile.extents = SequenceExtents{params.seq_q, params.seq_k, 0, 0, params.seq_q, params.seq_k};
    return item;
  }

  // The first item from `number` on of which some row sees some key; `end` if there is none.
  __device__ __forceinline__ int next(int number) const {
    for (; number < end; ++number) {
      const BiasItem item = at(number);
      const auto visible = [&](int row) {
        return visible_keys<MaskKind::kRuntime>(params, item.tile.extents, row);
      };
      const int last_row = min(item.tile.row + Spec::kOwnRows, params.seq_q) - 1;
      if (visible(item.tile.row).begin < item.key + Spec::kStreamRows && visible(last_row).end > item.key) break;
    }
    return number;
  }
};

// rows: those of the warp; sums of its tile, to their place.
template <typename Spec>
__device__ __forceinline__ void store_bias_gradient(const BiasGradientParams& params, const BiasItems<Spec>& items,
                                                    const WarpCoordinates<Spec>& warp, const Scores<Spec>& sums) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index();
  const int64_t matrix = (static_cast<int64_t>(items.split) * params.batches + items.batch) * params.heads + items.head;
  const int first_row = items.row_tile * Spec::kOwnRows + warp.first_row() + lane / 4;
  const int first_key = items.key_tile * Spec::kStreamRows + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8;
      if (row >= params.rows) continue;
      const int64_t at = (matrix * params.rows + row) * params.keys;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int key = first_key + n * 8 + c;
          if (key >= params.keys) continue;
          const float sum = sums[m][n][2 * half + c];
          if (params.is_float != 0) {
            ptx::st_global_float(static_cast<float*>(params.sums) + at + key, sum);
          } else {
            ptx::st_global_16(static_cast<Element*>(params.sums) + at + key,
                              static_cast<uint16_t>(pack<Element>(sum, 0.0f)));
          }
        }
    }
}

// smem: Q [kOwnRows, kHeadDim], dO, K [kStreamRows, kHeadDim], V.
template <typename Spec, typename Stream>
__device__ __forceinline__ void bias_gradient(const BiasGradientParams& all) {
  using Element = typename Spec::Element;
  const BackwardParams& params = all.launched.backward;
  const ptx::SmemPointer smem = ptx::dynamic_shared_memory();
  const ptx::SmemPointer Q_smem = smem, dO_smem = smem + Spec::kOwnBytes;
  const ptx::SmemPointer K_smem = smem + Spec::kStreamOffset, V_smem = K_smem + Spec::kStreamBytes;
  const WarpCoordinates<Spec> warp(ptx::warp_index());
  const int lane = ptx::lane_index();
  const BiasItems<Spec> items(all);
  const int group = heads_per_key_head(params);

  const auto load = [&](const BiasItem& item, bool is_first) {
    const int key_head = item.tile.head / group;
    const Strides& row_stride = is_first ? params.q_stride : params.dout_stride;
    const Strides& key_stride = is_first ? params.k_stride : params.v_stride;
    const int columns = is_first ? params.head_dim : params.head_dim_v;
    Stream::template copy<Spec::kOwnRows>(
        is_first ? Q_smem : dO_smem,
        static_cast<const Element*>(is_first ? params.q : params.dout) +
            row_offset(row_stride, item.tile, item.tile.head),
        row_stride.row, item.tile.row, params.seq_q, columns);
    Stream::template copy<Spec::kStreamRows>(
        is_first ? K_smem : V_smem,
        static_cast<const Element*>(is_first ? params.k : params.v) + key_offset(key_stride, item.tile, key_head),
        key_stride.row, item.key, params.seq_k, columns);
    Stream::commit();
  };

  Scores<Spec> sums;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;

  int number = items.next(items.first_of(items.split));
  if (number < items.end) load(items.at(number), true);
  const QueryOperand<Spec> Q(Q_smem + warp.first_row() * Spec::kRowBytes);
  const QueryOperand<Spec> dO(dO_smem + warp.first_row() * Spec::kRowBytes);
  ScoreModWeights<Spec> score_mod;
  TileDropout<Spec> dropout(params, items.at(0).tile);
  while (number < items.end) {
    const BiasItem item = items.at(number);
    const int row = item.tile.row + warp.first_row();
    float lse_log2[Spec::kMmaM][2];
    float row_dot[Spec::kMmaM][2];
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + m * 16 + half * 8 + lane / 4;
        const bool is_inside = own < params.seq_q;
        const int64_t at = first_statistic(params, item.tile, item.tile.head) + own;
        lse_log2[m][half] = in_base_2(is_inside ? ptx::ld_global_float(params.lse + at) : ptx::negative_infinity());
        row_dot[m][half] = is_inside ? ptx::ld_global_float(params.row_dot + at) : 0.0f;
      }
    score_mod.load_mask(params, item.tile, item.tile.head, row, item.key);
    Stream::wait();
    ptx::barrier_sync_block();  // Q and K are whole; all warps are done with dO and V of the item before
    load(item, false);
    Scores<Spec> scores;
    multiply_query_key<Spec>(scores, Q, K_smem);
    score_mod.weigh_keys(params, scores, lse_log2, item.tile, row, item.key);
    number = items.next(number + 1);
    Stream::wait();
    ptx::barrier_sync_block();  // dO and V are whole; all warps are done with Q and K
    if (number < items.end) load(items.at(number), true);
    Scores<Spec> gradients;
    multiply_query_key<Spec>(gradients, dO, V_smem);
    if constexpr (Spec::kHasDropout) {
      dropout.of_head.head = static_cast<uint32_t>(item.tile.head);
      dropout.of_head.sequence = static_cast<uint32_t>(item.tile.batch);
      dropout.drop(gradients, row, item.key);
    }
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[m][n][i] = ptx::fma_rn(scores[m][n][i], gradients[m][n][i] - row_dot[m][i / 2], sums[m][n][i]);
        }
  }
  store_bias_gradient<Spec>(all, items, warp, sums);
}

}  // namespace mma_sync
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
