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

// A tile of the scores.
struct BiasItem {
  int batch;
  int head;  // of the queries
  int row;   // the first
  int key;   // likewise
};

// The tile of the mask that this thread block owns, and the items that share it, one after the other.
template <typename Spec>
struct BiasItems {
  const BackwardParams& params;
  const BiasGradientParams& all;
  BiasItem own;  // of the mask: 0 where it has one element
  int split;
  BiasItem item;
  int left;  // items of this block from `item` on

  __device__ __forceinline__ explicit BiasItems(const BiasGradientParams& all_)
      : params(all_.launched.backward), all(all_) {
    const int row_tiles = ceil_div(params.seq_q, Spec::kOwnRows);
    const int key_tiles = ceil_div(params.seq_k, Spec::kStreamRows);
    int index = ptx::block_index();
    const auto take = [&](int count) {
      const int taken = index % count;
      index /= count;
      return taken;
    };
    own.row = take(all.folds_rows != 0 ? 1 : row_tiles) * Spec::kOwnRows;
    own.key = take(all.folds_keys != 0 ? 1 : key_tiles) * Spec::kStreamRows;
    own.head = take(all.heads);
    own.batch = take(all.batches);
    split = index;
    const int shared_keys = all.folds_keys != 0 ? key_tiles : 1;
    const int shared_rows = all.folds_rows != 0 ? row_tiles : 1;
    const int shared_heads = params.heads_q / all.heads;
    const int64_t count = static_cast<int64_t>(params.batch / all.batches) * shared_heads * shared_rows * shared_keys;
    index = static_cast<int>(count * split / all.splits);
    left = static_cast<int>(count * (split + 1) / all.splits) - index;
    item.key = own.key + take(shared_keys) * Spec::kStreamRows;
    item.row = own.row + take(shared_rows) * Spec::kOwnRows;
    item.head = own.head + take(shared_heads);
    item.batch = own.batch + index;
    if (!is_seen()) advance();
  }

  __device__ __forceinline__ SequenceExtents extents() const {
    return SequenceExtents{params.seq_q, params.seq_k, 0, 0, params.seq_q, params.seq_k};
  }
  __device__ __forceinline__ VarlenTile tile() const { return VarlenTile{item.batch, item.head, item.row, extents()}; }
  __device__ __forceinline__ KeyRange visible(int row) const {
    return visible_keys<MaskKind::kRuntime>(params, extents(), row);
  }
  // Whether some row of the item sees some key.
  __device__ __forceinline__ bool is_seen() const {
    const int last_row = min(item.row + Spec::kOwnRows, params.seq_q) - 1;
    return visible(item.row).begin < item.key + Spec::kStreamRows && visible(last_row).end > item.key;
  }

  // To the next item that is seen.
  __device__ __forceinline__ void advance() {
    do {
      --left;
      if (all.folds_keys != 0 && (item.key += Spec::kStreamRows) < params.seq_k) continue;
      item.key = own.key;
      if (all.folds_rows != 0 && (item.row += Spec::kOwnRows) < params.seq_q) continue;
      item.row = own.row;
      if (all.heads == 1 && ++item.head < params.heads_q) continue;
      item.head = own.head;
      ++item.batch;
    } while (left > 0 && !is_seen());
  }
};

// The statistics of a thread's rows, as they lie in memory: nothing waits for them before they are needed.
template <typename Spec>
struct BiasStatistics {
  float lse[Spec::kMmaM][2];
  float row_dot[Spec::kMmaM][2];

  __device__ __forceinline__ void load(const BackwardParams& params, const VarlenTile& tile, int row) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + m * 16 + half * 8 + ptx::lane_index() / 4;
        const int64_t at = first_statistic(params, tile, tile.head) + own;
        lse[m][half] = ptx::negative_infinity();
        row_dot[m][half] = 0.0f;
        if (own < params.seq_q) {
          lse[m][half] = ptx::ld_global_float(params.lse + at);
          row_dot[m][half] = ptx::ld_global_float(params.row_dot + at);
        }
      }
  }
};

// The mask's values of a thread's scores, in shared memory: each thread reads what it wrote itself. [pairs / 4][threads][16 bytes] for each
// 16 rows of the warp. Registers would not last for them.
template <typename Spec>
struct KeptMask {
  ptx::SmemPointer thread_smem;

  __device__ __forceinline__ explicit KeptMask(ptx::SmemPointer smem)
      : thread_smem(smem + (Spec::kMaskOffset + ptx::thread_index() * 16)) {}

  __device__ __forceinline__ ptx::SmemPointer at(int m, int four) const {
    return thread_smem + (m * kScorePairs<Spec> / 4 + four) * Spec::kNumThreads * 16;
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

// Scores to P. row, key: the warp's first.
template <typename Spec>
__device__ __forceinline__ void bias_weights(const BackwardParams& params, Scores<Spec>& scores,
                                             const KeptMask<Spec>& mask, const BiasStatistics<Spec>& statistics,
                                             const BiasItems<Spec>& items, int row, int key) {
  using Element = typename Spec::Element;
  const ScoreOptions& options = params.score_options;
  if (options.score_factor > 0.0f) {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = capped_score(options, scores[m][n][i]);
  }
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m) {
    const float lse_log2[2] = {in_base_2(statistics.lse[m][0]), in_base_2(statistics.lse[m][1])};
#pragma unroll
    for (int four = 0; four < kScorePairs<Spec> / 4; ++four) {
      uint32_t values[4];
      ptx::ld_shared_128(values, mask.at(m, four));
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const int half = pair % 2;
        const float2 value = unpack<Element>(values[pair]);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[m][2 * four + pair / 2][2 * half + c];
          const float exponent = ptx::fma_rn(score, params.scale_log2, -lse_log2[half]);
          score = ptx::exp2_approx(min(ptx::fma_rn(c == 0 ? value.x : value.y, kLog2E, exponent), 0.0f));
        }
      }
    }
  }
  if (items.visible(row).end - key >= Spec::kStreamRows && items.visible(row + Spec::kWarpRows - 1).begin <= key) {
    return;
  }
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange seen = items.visible(row + m * 16 + half * 8 + lane / 4);
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int own = key + n * 8 + lane % 4 * 2 + c;
          if (own < seen.begin || own >= seen.end) scores[m][n][2 * half + c] = 0.0f;
        }
    }
}

// rows: those of the warp; sums of its tile, to their place.
template <typename Spec>
__device__ __forceinline__ void store_bias_gradient(const BiasGradientParams& params, const BiasItems<Spec>& items,
                                                    const WarpCoordinates<Spec>& warp, const Scores<Spec>& sums) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index();
  const BiasItem& own = items.own;
  const int64_t matrix = (static_cast<int64_t>(items.split) * params.batches + own.batch) * params.heads + own.head;
  const int first_row = own.row + warp.first_row() + lane / 4;
  const int first_key = own.key + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + m * 16 + half * 8;
      if (row >= params.rows) continue;
      const int64_t at = (matrix * params.rows + row) * params.keys;
      float* sum_gmem = static_cast<float*>(params.sums) + at + first_key;
      Element* element_gmem = static_cast<Element*>(params.sums) + at + first_key;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n) {
        const int left = params.keys - first_key - n * 8;
        if (left <= 0) continue;
        const float* pair = &sums[m][n][2 * half];
        const uint32_t packed = pack<Element>(pair[0], pair[1]);
        if (params.is_float != 0) {
          ptx::st_global_float(sum_gmem + n * 8, pair[0]);
          if (left > 1) ptx::st_global_float(sum_gmem + n * 8 + 1, pair[1]);
        } else if (params.keys % 2 == 0) {  // a pair lies at a multiple of four bytes
          ptx::st_global_32(element_gmem + n * 8, packed);
        } else {
          ptx::st_global_16(element_gmem + n * 8, static_cast<uint16_t>(packed));
          if (left > 1) ptx::st_global_16(element_gmem + n * 8 + 1, static_cast<uint16_t>(packed >> 16));
        }
      }
    }
}

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
  BiasItems<Spec> items(all);

  const auto load = [&](bool is_first) {
    const VarlenTile tile = items.tile();
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
  TileDropout<Spec> dropout(params, items.tile());
  BiasStatistics<Spec> statistics;
  const KeptMask<Spec> mask(smem);
  const auto load_mask = [&] { mask.load(params, items.tile(), items.item.row + warp.first_row(), items.item.key); };
  if (items.left > 0) {
    load(true);
    statistics.load(params, items.tile(), items.item.row + warp.first_row());
    load_mask();
  }
  while (items.left > 0) {
    const BiasItem item = items.item;
    const int row = item.row + warp.first_row();
    Stream::wait();
    ptx::barrier_sync_block();  // Q and K are whole; all warps are done with dO and V of the item before
    load(false);
    Scores<Spec> scores;
    multiply_query_key<Spec>(scores, Q, K_smem);
    bias_weights<Spec>(params, scores, mask, statistics, items, row, item.key);
    const BiasStatistics<Spec> own = statistics;
    items.advance();
    Stream::wait();
    ptx::barrier_sync_block();  // dO and V are whole; all warps are done with Q and K
    if (items.left > 0) {
      load(true);
      statistics.load(params, items.tile(), items.item.row + warp.first_row());
      if (all.folds_rows != 0 || all.folds_keys != 0) load_mask();  // else the same for every item
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
  store_bias_gradient<Spec>(all, items, warp, sums);
}

}  // namespace mma_sync
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
