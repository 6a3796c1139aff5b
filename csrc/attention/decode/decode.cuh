// Attention of few query rows over many keys (decoding): a kernel bound only by memory.
//
// The query heads that share a key head are the rows of one 16-row tile, followed by those of the next position, so
// that K and V are read once. Each warp streams its own 16 keys of every key tile through its own ring in shared memory
// and never waits for another warp. The warps of a block synchronise once per segment (plan.cuh), to merge their
// results.
#pragma once

#include "attention/decode/load.cuh"
#include "attention/decode/merge.cuh"
#include "attention/decode/plan.cuh"
#include "attention/decode/spec.cuh"
#include "attention/forward/mma_sync/accumulate.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/scores.cuh"
#include "attention/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

using mma_sync::Accumulator;

// Applies softcap, mask or ALiBi, and visibility to a warp's scores S [16 rows, 16 keys]. What only a few tiles need is
// computed there, to save registers.
template <typename Spec>
struct ScoreRules {
  const ForwardParams& params;
  const Sequence<MaskKind::kRuntime>& sequence;
  const Segment& segment;
  KeyRange seen_by_all;  // keys that every row of the tile sees

  __device__ __forceinline__ ScoreRules(const ForwardParams& params_, const Sequence<MaskKind::kRuntime>& sequence_,
                                        const Segment& segment_)
      : params(params_), sequence(sequence_), segment(segment_) {
    seen_by_all.begin = keys_of(query_row<Spec>(params, segment, segment.rows - 1)).begin;
    seen_by_all.end = keys_of(query_row<Spec>(params, segment, 0)).end;
  }

  __device__ __forceinline__ KeyRange keys_of(const QueryRow& row) const {
    return window_around(params.score_options, sequence, diagonal_key(sequence, row.position));
  }

  // Rows past the last one are treated like the last one; their results are never stored.
  template <bool kHasMask>
  __device__ __forceinline__ void hide(float (&S_rmem)[1][Spec::kMmaN][4], int first_key) const {
    const ScoreOptions& options = params.score_options;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = min(segment.rows - 1, half * 8 + ptx::recompute(ptx::lane_index()) / 4);
      const QueryRow row = query_row<Spec>(params, segment, index);
      const KeyRange seen = keys_of(row);
      const int64_t mask_row = segment.batch * options.mask_stride_batch + row.head * options.mask_stride_head +
                               row.position * options.mask_stride_row;
      Alibi alibi{0.0f, 0.0f};
      if constexpr (Spec::kHasAlibi) {
        const int column = diagonal_key(sequence, row.position) - first_key - ptx::lane_index() % 4 * 2;
        alibi = Alibi{alibi_slope(options, options.mask_factor, segment.batch, row.head, row.position),
                      static_cast<float>(column)};
      }
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = first_key + n * 8 + ptx::lane_index() % 4 * 2 + i;
          float& score = S_rmem[0][n][2 * half + i];
          if (key < seen.begin || key >= seen.end) {
            score = ptx::negative_infinity();
          } else if (Spec::kHasAlibi) {
            score = alibi.add(score, 0, n * 8 + i);
          } else if (kHasMask) {
            score = masked_score<typename Spec::Element>(options, score, mask_row + key * options.mask_stride_key);
          }
        }
    }
  }

  __device__ __forceinline__ void apply(float (&S_rmem)[1][Spec::kMmaN][4], int first_key) const {
    const ScoreOptions& options = params.score_options;
    if (options.score_factor > 0.0f) {
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) S_rmem[0][n][i] = capped_score(options, S_rmem[0][n][i]);
    }
    if (options.mask != nullptr) {
      hide<true>(S_rmem, first_key);
    } else if (first_key < seen_by_all.begin || first_key + kWarpKeys > seen_by_all.end) {
      hide<false>(S_rmem, first_key);
    }
  }
};

// Computes this warp's part of a segment and leaves the result in shared memory. Loader: KeyLoader or any type with its
// functions.
template <typename Spec, typename Loader, typename... More>
__device__ __forceinline__ void attend(const ForwardParams& params, const Segment& segment, KvReuse reuse,
                                       const WarpResults<Spec>& results, const More&... more) {
  constexpr int kStages = Spec::kNumStages;
  const ptx::SmemPointer ring_smem = results.block_smem + ptx::warp_index() * Spec::kRingBytes;
  const Sequence<MaskKind::kRuntime> sequence = segment.sequence(params);
  Loader loader(params, sequence, segment, reuse, more...);
  loader.find(segment.tile);
  const auto load = [&](int tile, int stage) {
    if (tile < segment.end_tile) {
      loader.load(tile, stage, ring_smem + stage * Spec::kStageBytes);
      loader.find(tile + 1);
    } else {
      ptx::cp_async_commit();
      ptx::cp_async_commit();
    }
  };
  using Query = typename Loader::Query;
  const auto* Q_gmem =
      static_cast<const typename Spec::Element*>(params.q) + sequence.row_offset(params.q_stride, /*head=*/0);
  Query::copy(params, Q_gmem, segment, results.query());
  Query Q(params, Q_gmem, segment, results.query());
#pragma unroll 1
  for (int ahead = 0; ahead < kStages - 1; ++ahead) load(segment.tile + ahead, ahead);
  loader.begin();
  Q.prepare(params, Q_gmem, segment, results.query());
  const ScoreRules<Spec> rules(params, sequence, segment);
  Accumulator<Spec> accumulator;

  int stage = 0;
#pragma unroll 1
  for (int tile = segment.tile; tile < segment.end_tile; ++tile) {
    const ptx::SmemPointer K_smem = ring_smem + stage * Spec::kStageBytes;
    ptx::cp_async_wait<2 * (kStages - 1) - 1>();
    ptx::warp_sync();  // K of this tile is complete; the warp is done with the previous tile, whose stage is refilled
    load(tile + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    float S_rmem[1][Spec::kMmaN][4];
    loader.multiply(S_rmem, Q, K_smem, tile, stage);
    rules.apply(S_rmem, loader.first_key(tile));
    ptx::cp_async_wait<2 * (kStages - 1)>();
    ptx::warp_sync();  // V of this tile is complete
    mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, loader.values(K_smem + Spec::kTileBytes), params.scale_log2,
                                    /*is_masked=*/true);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
  ptx::warp_sync();  // write after read, and after copies: the ring
  loader.finish(accumulator.O_rmem);
  results.store(accumulator.rows, accumulator.O_rmem, params.scale_log2);
}

// Calls `attend` for every segment of the block's share and merges the results of its warps.
template <typename Spec, typename Attend>
__device__ __forceinline__ void for_each_segment(const ForwardParams& params, Attend attend) {
  const WarpResults<Spec> results{ptx::dynamic_shared_memory()};
  ptx::grid_dependency_wait();  // the preceding kernel may write lengths, pages or Q
  ptx::grid_launch_dependents();
  prefetch_tables<Spec>(params);
  Plan<Spec> plan(params);
  for (bool is_first = true;; is_first = false) {
    Segment segment;
    if (!plan.next(segment)) return;
    if (!is_first) ptx::barrier_sync_block();  // write after read: the warps' results
    attend(segment, plan.reuse, results);
    finish_segment<Spec>(params, segment, plan.item_split(segment), results);
    if (plan.reuse == KvReuse::kOnce && params.hints != 0) plan.reuse = KvReuse::kOnceInSmallBatch;
  }
}

template <typename Spec>
__device__ __forceinline__ void decode(const ForwardParams& params) {
  for_each_segment<Spec>(params, [&](const Segment& segment, KvReuse reuse, const WarpResults<Spec>& results) {
    if constexpr (Spec::kHasTwoLoops) {
      if (reuse == KvReuse::kOften) {
        attend<Spec, KeyLoader<Spec, Words::kNever>>(params, segment, reuse, results);
      } else {
        attend<Spec, KeyLoader<Spec, Words::kAlways>>(params, segment, reuse, results);
      }
    } else {
      attend<Spec, KeyLoader<Spec, Words::kByReuse>>(params, segment, reuse, results);
    }
  });
}

}  // namespace flashmoe::attention::decode
