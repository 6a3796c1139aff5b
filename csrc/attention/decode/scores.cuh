// The first of the two kernels that decode with the same bits as a prefill: computes the scores q k^T of all keys, in
// float32.
//
// A prefill adds P V of one key block after the other in the accumulators of the tensor cores, so its sums over keys
// cannot be divided. But a score depends on no other key, and an output column on no other column. So this kernel
// divides the keys, evenly over all blocks as in decode.cuh, and values.cuh divides the columns and walks over the
// scores in the prefill's order.
//
// A group of 16 keys has kRow floats for each row of the item: quad lane t has those of keys 2t, 2t + 1, 2t + 8 and
// 2t + 9, as in an accumulator. Every group of the item's key tiles is written, with -inf if a row does not see a key.
#pragma once

#include "attention/decode/decode.cuh"
#include "attention/decode/load.cuh"
#include "attention/decode/plan.cuh"
#include "attention/decode/spec.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

// The scores of one item: a query tile of at most kBlockM rows of one key head of one sequence. Every item has room for
// the most rows that an item can have.
template <int kBlockM, int kTileKeys>
struct ItemScores {
  static constexpr int kRow = kWarpKeys;  // floats per row, for 16 keys

  float* gmem;
  int rows;

  __device__ __forceinline__ ItemScores(const ForwardParams& params, int batch, int head_kv, int row_block)
      : rows(min(kBlockM, params.seq_q * params.score_options.folded_heads)) {
    const int row_blocks = ceil_div(params.seq_q * params.score_options.folded_heads, kBlockM);
    const int64_t item = (static_cast<int64_t>(batch) * params.heads_kv + head_kv) * row_blocks + row_block;
    gmem = params.out_partial + item * (ceil_div(params.seq_k, kTileKeys) * kTileKeys) * rows;
  }

  __device__ __forceinline__ float* at(int key, int row) const {
    return gmem + (static_cast<int64_t>(key) / kWarpKeys * rows + row) * kRow;
  }
};

// kBlockN: keys of a tile, 16 per warp. kNumStages - 1 tiles of each warp's ring are in flight.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_>
struct ScoresSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kTileKeys = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kHasAlibi = false;
  static constexpr bool kHasValues = false;
  static constexpr bool kQueryInRegisters = true;
  static constexpr bool kHasTwoLoops = false;
  static constexpr int kBlockN = kWarpKeys;
  static constexpr int kMmaM = 1;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr int kMmaD = kHeadDim / 8;

  using KeyTile = RowTile<Element, kHeadDim>;
  using Scores = ItemScores<kBlockM, kTileKeys>;
  static constexpr int kTileBytes = kWarpKeys * KeyTile::kRowBytes;
  static constexpr int kStageBytes = kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  static constexpr int kSharedBytes = kNumWarps * kRingBytes;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kHeadDim % 64 == 0, "the swizzle permutes within 64 columns");
  static_assert(kBlockM == 8, "the upper half of an m16n8k16 product is all that is stored");
  static_assert(kTileKeys == kWarpKeys * kNumWarps, "each warp has 16 keys of a tile");
  static_assert(kNumStages >= 2, "a tile is multiplied while another one loads");
};

// Computes the scores of this warp's part of a segment.
template <typename Spec>
__device__ __forceinline__ void score_keys(const ForwardParams& params, const Segment& segment, KvReuse reuse) {
  using Loader = KeyLoader<Spec, Words::kByReuse>;
  constexpr int kStages = Spec::kNumStages;
  const ptx::SmemPointer ring_smem =
      ptx::SmemPointer(ptx::dynamic_shared_memory()) + ptx::warp_index() * Spec::kRingBytes;
  const Sequence<MaskKind::kRuntime> sequence = segment.sequence(params);
  Loader loader(params, sequence, segment, reuse);
  loader.find(segment.tile);
  const auto load = [&](int tile, int stage) {
    if (tile < segment.end_tile) {
      loader.load(tile, stage, ring_smem + stage * Spec::kStageBytes);
      loader.find(tile + 1);
    } else {
      ptx::cp_async_commit();
    }
  };
#pragma unroll 1
  for (int ahead = 0; ahead < kStages - 1; ++ahead) load(segment.tile + ahead, ahead);
  const auto* Q_gmem =
      static_cast<const typename Spec::Element*>(params.q) + sequence.row_offset(params.q_stride, /*head=*/0);
  typename Loader::Query Q(params, Q_gmem, segment, ring_smem);
  Q.prepare(params, Q_gmem, segment, ring_smem);
  const ScoreRules<Spec> rules(params, sequence, segment);
  const typename Spec::Scores scores(params, segment.batch, segment.head_kv, segment.row / Spec::kBlockM);
  const int row = ptx::lane_index() / 4;

  int stage = 0;
#pragma unroll 1
  for (int tile = segment.tile; tile < segment.end_tile; ++tile) {
    ptx::cp_async_wait<kStages - 2>();
    ptx::warp_sync();  // K of this tile is complete; the warp is done with the previous tile, whose stage is refilled
    load(tile + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
    float S_rmem[1][Spec::kMmaN][4];
    loader.multiply(S_rmem, Q, ring_smem + stage * Spec::kStageBytes, tile, stage);
    rules.apply(S_rmem, loader.first_key(tile));
    if (row < segment.rows) {
      const uint32_t words[4] = {ptx::float_bits(S_rmem[0][0][0]), ptx::float_bits(S_rmem[0][0][1]),
                                 ptx::float_bits(S_rmem[0][1][0]), ptx::float_bits(S_rmem[0][1][1])};
      ptx::st_global_128(scores.at(loader.first_key(tile), row) + ptx::lane_index() % 4 * 4, words);
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  ptx::cp_async_wait<0>();
  ptx::warp_sync();  // write after read: the ring, by the next segment
}

template <typename Spec>
__device__ __forceinline__ void decode_scores(const ForwardParams& params) {
  ptx::grid_dependency_wait();  // the preceding kernel may write lengths, pages or Q
  ptx::grid_launch_dependents();
  prefetch_tables<Spec>(params);
  Plan<Spec> plan(params);
  Segment segment;
  while (plan.next(segment)) score_keys<Spec>(params, segment, plan.reuse);
}

}  // namespace flashmoe::attention::decode
