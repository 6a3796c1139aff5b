// Shared by the kernels for an additive mask's gradient, with wgmma or mma.sync: which tiles of the scores a tile of
// the mask sums up, how scores become P, and where the sums are stored.
#pragma once

#include "attention/backward/score_mod.cuh"
#include "attention/backward/sequence_tiles.cuh"
#include "attention/masks.cuh"
#include "attention/params/bias_gradient.h"
#include "attention/scores.cuh"
#include "device/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::backward {

// A thread block's tile of the mask has kOwnRows rows and kStreamRows keys of one of its matrices. The tiles of the
// scores that share it, its items, come in ascending order: batch by batch, head by head, and if the mask has one row,
// or one key, row tile by row tile, or key tile by key tile. No other block adds to the tile, so its bits are the same
// on every run.

// A tile of the scores.
struct BiasItem {
  int batch;
  int head;  // of q
  int row;   // the first
  int key;   // the first
};

// The tile of the mask that this thread block owns, and the items that share it, in order.
template <typename Spec>
struct BiasItems {
  const BackwardParams& params;
  const BiasGradientParams& all;
  BiasItem own;  // of the mask: 0 where it has one element
  int split;
  BiasItem item;
  int left;  // items of this block from `item` on

  // index: over row tiles, key tiles, heads and batches of the mask, then splits, the first varying fastest.
  __device__ __forceinline__ BiasItems(const BiasGradientParams& all_, int index)
      : params(all_.launched.backward), all(all_) {
    const int row_tiles = ceil_div(params.seq_q, Spec::kOwnRows);
    const int key_tiles = ceil_div(params.seq_k, Spec::kStreamRows);
    const auto take = [&](int count) {
      const int taken = index % count;
      index /= count;
      return taken;
    };
    own.row = take(folds_rows() ? 1 : row_tiles) * Spec::kOwnRows;
    own.key = take(folds_keys() ? 1 : key_tiles) * Spec::kStreamRows;
    own.head = take(all.heads);
    own.batch = take(all.batches);
    split = index;
    const int shared_keys = folds_keys() ? key_tiles : 1;
    const int shared_rows = folds_rows() ? row_tiles : 1;
    const int shared_heads = params.heads_q / all.heads;
    const int64_t count = static_cast<int64_t>(params.batch / all.batches) * shared_heads * shared_rows * shared_keys;
    index = static_cast<int>(count * split / all.splits);
    left = static_cast<int>(count * (split + 1) / all.splits) - index;
    item.key = own.key + take(shared_keys) * Spec::kStreamRows;
    item.row = own.row + take(shared_rows) * Spec::kOwnRows;
    item.head = own.head + take(shared_heads);
    item.batch = own.batch + index;
    if constexpr (!Spec::kFolds) {
      if (!is_seen()) left = 0;  // then no item is seen
    } else if (!is_seen()) {
      advance();
    }
  }

  // Whether the mask has one row, or one key.
  __device__ __forceinline__ bool folds_rows() const { return Spec::kFolds && all.folds_rows != 0; }
  __device__ __forceinline__ bool folds_keys() const { return Spec::kFolds && all.folds_keys != 0; }

  __device__ __forceinline__ SequenceExtents extents() const {
    return SequenceExtents{params.seq_q, params.seq_k, 0, 0, params.seq_q, params.seq_k};
  }
  __device__ __forceinline__ KeyRange visible(int row) const {
    return window_keys(params.score_options, extents(), row);
  }
  // Whether any row of the item sees any key of it.
  __device__ __forceinline__ bool is_seen() const {
    const int last_row = min(item.row + Spec::kOwnRows, params.seq_q) - 1;
    return visible(item.row).begin < item.key + Spec::kStreamRows && visible(last_row).end > item.key;
  }

  // Advances to the next item that is seen.
  __device__ __forceinline__ void advance() {
    do {
      --left;
      if (folds_keys() && (item.key += Spec::kStreamRows) < params.seq_k) continue;
      item.key = own.key;
      if (folds_rows() && (item.row += Spec::kOwnRows) < params.seq_q) continue;
      item.row = own.row;
      if (all.heads == 1 && ++item.head < params.heads_q) continue;
      item.head = own.head;
      ++item.batch;
    } while (Spec::kFolds && left > 0 && !is_seen());
  }
};

// A thread's scores, in the accumulator layout of both wgmma and mma.sync.
template <typename Spec>
using BiasScores = float[Spec::kMmaM][Spec::kMmaN][4];

// The statistics of a thread's rows, unconverted: nothing waits for the loads before the values are needed.
template <typename Spec>
struct BiasStatistics {
  float lse[Spec::kMmaM][2];
  float row_dot[Spec::kMmaM][2];

  // row: the warp's first.
  __device__ __forceinline__ void load(const BackwardParams& params, const BiasItem& item, int row) {
    const int64_t first = (static_cast<int64_t>(item.batch) * params.heads_q + item.head) * params.seq_q;
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + m * 16 + half * 8 + ptx::lane_index() / 4;
        lse[m][half] = ptx::negative_infinity();
        row_dot[m][half] = 0.0f;
        if (own < params.seq_q) {
          lse[m][half] = ptx::ld_global_float(params.lse + first + own);
          row_dot[m][half] = ptx::ld_global_float(params.row_dot + first + own);
        }
      }
  }
};

// Turns scores into P. row, key: the warp's first. mask.read(values, m, four): the mask's values of four pairs of the
// thread's scores, pairs 4 * four and on of its 16 rows m.
template <typename Spec, typename Mask>
__device__ __forceinline__ void bias_weights(const BackwardParams& params, BiasScores<Spec>& scores, const Mask& mask,
                                             const BiasStatistics<Spec>& statistics, const BiasItems<Spec>& items,
                                             int row, int key) {
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
      mask.read(values, m, four);
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

// Stores the sums of a warp, whose rows begin at warp_row of the tile.
template <typename Spec>
__device__ __forceinline__ void store_bias_gradient(const BiasGradientParams& params, const BiasItems<Spec>& items,
                                                    int warp_row, const BiasScores<Spec>& sums) {
  using Element = typename Spec::Element;
  const int lane = ptx::lane_index();
  const BiasItem& own = items.own;
  const int64_t matrix = (static_cast<int64_t>(items.split) * params.batches + own.batch) * params.heads + own.head;
  const int first_row = own.row + warp_row + lane / 4;
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
        } else if (params.keys % 2 == 0) {  // pairs are aligned to four bytes
          ptx::st_global_32(element_gmem + n * 8, packed);
        } else {
          ptx::st_global_16(element_gmem + n * 8, static_cast<uint16_t>(packed));
          if (left > 1) ptx::st_global_16(element_gmem + n * 8 + 1, static_cast<uint16_t>(packed >> 16));
        }
      }
    }
}

}  // namespace flashmoe::attention::backward
