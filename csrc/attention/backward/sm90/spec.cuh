// The compile-time values of the sm90 backward kernels and their shared-memory layout.
//
// The dq kernel and the dk, dv kernel have the same form. A warpgroup owns 64 rows: of Q and dO in the dq kernel, of K
// and V in the dk, dv kernel. The rows of the other two tensors stream past it in blocks. "First" is the pair whose
// product gives the scores, Q and K; "second" the pair whose product gives dP, dO and V.
//
//                        own rows (first, second)     stream (first, second)
//   query_gradient       Q, dO                        K, V
//   key_value_gradient   K, V                         Q, dO
#pragma once

#include "attention/params/backward.h"
#include "device/ring.cuh"
#include "device/shared_tile.cuh"
#include "ptx/mbarrier.cuh"

namespace flashmoe::attention::backward::sm90 {

// Warpgroup 0 is the producer (it issues the TMA loads), the others compute.
//   kOwnRows         rows that a tile owns
//   kStreamRows      rows of one block of the stream
//   kFirstStages     blocks of the first stream tensor in shared memory
//   kSecondStages    blocks of the second
//   kHasStatistics   the log-sum-exp and row_dot of each row of the stream are streamed too
//   kIsPaired        the two tensors of a block share the barriers of the first: one wait and one arrival fewer per
//                    block
//   kSharesRows      two warpgroups own the same 64 rows: one computes P and dv, the other dP and dk
//   kIsVarlen        for MaskKind::kRuntime: a tile carries its sequence's extents
//   kScores          varlen, 1: a softcap or a mask tensor comes before the softmax (kHasScoreMod); 2: a softcap or
//                    ALiBi
//   kFewerValueColumns   number of columns by which the second pair is narrower than the first
template <typename Element_, int kHeadDim_, int kOwnRows_, int kStreamRows_, int kFirstStages_, int kSecondStages_,
          int kNumWarps_, bool kHasStatistics_, bool kSharesRows_, bool kIsPaired_, bool kIsVarlen_, int kScores_,
          int kFewerValueColumns_>
struct TileSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kValueDim = kHeadDim_ - kFewerValueColumns_;  // of V, dO and dv
  static constexpr int kOwnRows = kOwnRows_;
  static constexpr int kStreamRows = kStreamRows_;
  static constexpr int kFirstStages = kFirstStages_;
  static constexpr int kSecondStages = kSecondStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr bool kHasStatistics = kHasStatistics_;
  static constexpr bool kSharesRows = kSharesRows_;
  static constexpr bool kIsPaired = kIsPaired_;
  static constexpr bool kIsVarlen = kIsVarlen_;
  static constexpr bool kHasScoreMod = kScores_ != 0;
  static constexpr bool kHasAlibi = kScores_ == 2;
  static constexpr bool kServesPlain = false;
  static constexpr bool kHasDropout = false;
  static constexpr int kNumDrawers = 0;            // warps that draw which scores are dropped: see DropoutFusedSpec
  static constexpr int kMaskBytes = 0;             // of a block of a mask tensor in a stage: see MaskFusedSpec
  static constexpr bool kOrdersReduction = false;  // tiles of a head add to dq in a fixed order: see fused.cuh
  static constexpr int kTileReaders =
      kIsVarlen_ && kHasStatistics_ ? 2 : 0;  // warps other than the consumers that read the first own tile's record

  static constexpr int kNumOwnTiles = kOwnRows / 64;
  static constexpr int kNumConsumers = kSharesRows ? 2 : kNumOwnTiles;
  static constexpr int kConsumersPerTile = kNumConsumers / kNumOwnTiles;
  static constexpr int kNumThreads = kNumWarps * 32;
  using OwnTile = SharedTile<64, kHeadDim>;  // a warpgroup's rows of the first
  using OwnSecondTile = SharedTile<64, kValueDim>;
  using StreamTile = SharedTile<kStreamRows, kHeadDim>;  // one block of the first
  using StreamSecondTile = SharedTile<kStreamRows, kValueDim>;

  static_assert(kHeadDim <= 256, "wgmma takes N <= 256");
  static_assert(kOwnRows % 64 == 0 && kNumConsumers >= 2 && kNumConsumers <= 3, "a warpgroup owns 64 rows");
  static_assert(!kSharesRows || kOwnRows == 64, "the two warpgroups of a tile own 64 rows");
  static_assert(kStreamRows % 16 == 0 && kStreamRows <= 256, "k of a product is 16, and a box has at most 256 rows");
  static_assert(!kHasStatistics || kStreamRows % 32 == 0, "each lane of a warp fetches the statistics of as many rows");
  static_assert(kNumWarps == 4 * (kNumConsumers + 1), "one producer warpgroup and the consumers");
  static_assert(!kIsPaired || kFirstStages == kSecondStages, "both tensors share a stage");
  static_assert(kFirstStages >= 2, "a block of the first is released once the next block's scores have been issued");

  // A consumer that computes dk and dv of 128 columns, or of 64 with lookahead, or dq of 256, needs all available
  // registers.
  static constexpr bool kIsFull =
      kHasStatistics ? !kSharesRows && (kHeadDim == 128 || !kHasScoreMod) && kStreamRows == 64 : kHeadDim == 256;
  // Registers per thread, multiples of 8; 128 * (producer + consumers * consumer) <= 65536, and at most what a launch
  // with this number of threads gets.
  static constexpr int kProducerRegisters = kNumConsumers == 3      ? (kIsVarlen ? 56 : 32)
                                            : kIsVarlen && !kIsFull ? 56
                                                                    : 24;
  static constexpr int kConsumerRegisters = kNumConsumers == 3      ? (kIsVarlen ? 152 : 160)
                                            : kIsVarlen && !kIsFull ? 224
                                                                    : 240;

  // Bytes.
  static constexpr int kOwnBytes = OwnTile::kBytes;
  static constexpr int kOwnSecondBytes = kSharesRows ? kOwnBytes : OwnSecondTile::kBytes;  // dk overwrites V
  static constexpr int kStatisticsBytes = kHasStatistics ? 2 * kStreamRows * 4 : 0;        // per block
  static constexpr int kProbabilityBytes =
      kSharesRows ? 64 * kStreamRows * 2 : 0;  // P, from one warpgroup to the other

  static constexpr int kOwnOffset = 0;
  static constexpr int kFirstOffset = kOwnOffset + kNumOwnTiles * (kOwnBytes + kOwnSecondBytes);
  static constexpr int kSecondOffset = kFirstOffset + kFirstStages * StreamTile::kBytes;
  static constexpr int kProbabilityOffset = kSecondOffset + kSecondStages * StreamSecondTile::kBytes;
  static constexpr int kStatisticsOffset = kProbabilityOffset + kProbabilityBytes;
  static constexpr int kTileBytes = kIsVarlen ? 48 : 16;                       // Tile, VarlenTile
  static constexpr int kProducerBytes = kIsVarlen ? kTileBytes + 32 * 16 : 0;  // the producer's own state
  static constexpr int kTileOffset = kStatisticsOffset + kFirstStages * kStatisticsBytes;
  static constexpr int kBarrierOffset = kTileOffset + kNumOwnTiles * kTileBytes + kProducerBytes;
  static constexpr int kNumBarriers = 3 * kNumOwnTiles + 2 * (kFirstStages + (kIsPaired ? 0 : kSecondStages));
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// A tile of kBlockM rows of Q; blocks of kBlockN keys. kNumStages blocks of K, kValueStages of V.
//   kLookahead_   the next block's scores are issued before this block's dS is computed: needs registers for another
//                 64 x kBlockN
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kValueStages,
          int kLookahead_, bool kIsVarlen_ = false, int kScores_ = 0, int kFewerValueColumns_ = 0>
struct QueryGradientSpec
    : TileSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kValueStages, kNumWarps, false, false,
               kLookahead_ == 0 && kNumStages == kValueStages, kIsVarlen_, kScores_, kFewerValueColumns_> {
  static constexpr bool kLookahead = kLookahead_ != 0;
  static_assert(!kLookahead || (kNumStages >= 3 && kValueStages >= 2), "K of three blocks is in use at a time");
  static_assert(!kLookahead || kBlockN >= 64, "of a warpgroup's blocks at most two need a mask");
};

// A tile of kBlockN keys; blocks of kBlockM rows of Q and dO, kNumStages of each. With kBlockN 64 the warpgroups share
// the tile.
//   kLookahead_          as in QueryGradientSpec
//   kStartsFromRowDot_   dP starts from -row_dot, and dS = P dP. Head dim 128: causal 5% to 7% faster, full 2% slower;
//                        head dim 64: up to 4% slower
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kLookahead_,
          int kStartsFromRowDot_, bool kIsVarlen_ = false, int kScores_ = 0, int kFewerValueColumns_ = 0>
struct KeyValueGradientSpec : TileSpec<Element, kHeadDim, kBlockN, kBlockM, kNumStages, kNumStages, kNumWarps, true,
                                       kBlockN == 64, kBlockN != 64, kIsVarlen_, kScores_, kFewerValueColumns_> {
  static constexpr bool kLookahead = kLookahead_ != 0;
  static constexpr bool kStartsFromRowDot = kStartsFromRowDot_ != 0;
  // With dk and dv of a warpgroup's keys there are no registers for both S^T and dP^T: they are computed one after the
  // other.
  static constexpr bool kIsTight = kBlockN != 64 && 2 * kHeadDim - kFewerValueColumns_ > 256;
  static_assert(!kIsTight || (kStartsFromRowDot && kScores_ == 0), "no registers for row_dot or mask values");
  static_assert(!kStartsFromRowDot || (!kLookahead && kBlockN > 64), "no gain measured with lookahead or 64 keys");
  static_assert(kNumStages >= 2, "a block of dO, too, is released once the next block's scores have been issued");
  static_assert(!kLookahead || (kNumStages >= 3 && kBlockM >= 64 && kBlockN > 64),
                "Q of three blocks is in use at a time");
};

// For MaskKind::kRuntime.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kValueStages,
          int kLookahead, int kScores, int kFewerValueColumns>
using VarlenQueryGradientSpec = QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps,
                                                  kValueStages, kLookahead, true, kScores, kFewerValueColumns>;
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kLookahead,
          int kStartsFromRowDot, int kScores, int kFewerValueColumns>
using VarlenKeyValueGradientSpec =
    KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kLookahead, kStartsFromRowDot,
                         true, kScores, kFewerValueColumns>;

// The same with dropout: these take DropoutBackwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kValueStages>
struct DropoutQueryGradientSpec
    : QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kValueStages, 0, true> {
  static constexpr bool kHasDropout = true;
};
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps>
struct DropoutKeyValueGradientSpec
    : KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, 0, 0, true> {
  static constexpr bool kHasDropout = true;
  static constexpr int kProducerRegisters = 40;  // 128 * (40 + 2 * 232) = 64512
  static constexpr int kConsumerRegisters = 232;
  static_assert(kBlockN == 64, "only tiles with two consumers support dropout");
};

// The position of row `row` of a block among its statistics: the four columns of a lane, 2t, 2t + 1, 2t + 8 and 2t + 9
// of every 16 with t = lane % 4, are adjacent for one 16-byte load.
__device__ __forceinline__ int statistics_index(int row) {
  return row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2;
}

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  __device__ __forceinline__ typename Spec::OwnTile own_first(int tile) const {
    return {base + Spec::kOwnOffset + tile * (Spec::kOwnBytes + Spec::kOwnSecondBytes)};
  }
  __device__ __forceinline__ typename Spec::OwnSecondTile own_second(int tile) const {
    return {own_first(tile).smem + Spec::kOwnBytes};
  }
  __device__ __forceinline__ typename Spec::StreamTile first(int stage) const {
    return {base + Spec::kFirstOffset + stage * Spec::StreamTile::kBytes};
  }
  __device__ __forceinline__ typename Spec::StreamSecondTile second(int stage) const {
    return {base + Spec::kSecondOffset + stage * Spec::StreamSecondTile::kBytes};
  }
  // [2][kStreamRows] fp32: log-sum-exp in base 2 (+inf for a row whose P is zero), then row_dot
  // (negated if kStartsFromRowDot), in the order of statistics_index. For the block in first(stage), guarded by the
  // same two barriers.
  __device__ __forceinline__ unsigned char* statistics(int stage) const {
    return base + Spec::kStatisticsOffset + stage * Spec::kStatisticsBytes;
  }
  // [kStreamRows / 16][128 threads][16 bytes]: the packed P of each thread.
  __device__ __forceinline__ unsigned char* probabilities() const { return base + Spec::kProbabilityOffset; }
  // The Tile or VarlenTile (schedule.cuh) that the own rows belong to; guarded by tile_full and own_empty.
  __device__ __forceinline__ unsigned char* tile(int tile) const {
    return base + Spec::kTileOffset + tile * Spec::kTileBytes;
  }

  // Varlen: the producer's own state, its current tile and 16 bytes of its finder per lane.
  __device__ __forceinline__ unsigned char* produced_tile() const { return tile(Spec::kNumOwnTiles); }
  __device__ __forceinline__ unsigned char* finder() const { return tile(Spec::kNumOwnTiles + 1); }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: TMA has written the buffers. empty: every consumer has read them for the last time.
  __device__ __forceinline__ ptx::Mbarrier* own_full(int tile) const { return barrier(tile); }
  __device__ __forceinline__ ptx::Mbarrier* own_empty(int tile) const { return barrier(Spec::kNumOwnTiles + tile); }
  // The tile's record is written; its rows follow.
  __device__ __forceinline__ ptx::Mbarrier* tile_full(int tile) const { return barrier(2 * Spec::kNumOwnTiles + tile); }
  __device__ __forceinline__ ptx::Mbarrier* first_full(int stage) const {
    return barrier(3 * Spec::kNumOwnTiles + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* first_empty(int stage) const {
    return first_full(Spec::kFirstStages + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* second_full(int stage) const {
    return first_full(2 * Spec::kFirstStages + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* second_empty(int stage) const {
    return second_full(Spec::kSecondStages + stage);
  }
};

template <typename Spec>
__device__ __forceinline__ void init_barriers(const SharedMemory<Spec>& shared) {
  constexpr int kConsumerWarps = 4 * Spec::kNumConsumers;
#pragma unroll
  for (int tile = 0; tile < Spec::kNumOwnTiles; ++tile) {
    ptx::mbarrier_init(shared.own_full(tile), 1);
    ptx::mbarrier_init(shared.tile_full(tile), 1);
    // Varlen: also the warps that read the first own tile's record.
    ptx::mbarrier_init(shared.own_empty(tile), Spec::kConsumersPerTile + (tile == 0 ? Spec::kTileReaders : 0));
  }
#pragma unroll
  for (int stage = 0; stage < Spec::kFirstStages; ++stage) {
    ptx::mbarrier_init(shared.first_full(stage),
                       Spec::kHasStatistics ? 33 : 1);  // the copy, and a warp with statistics
    ptx::mbarrier_init(shared.first_empty(stage), kConsumerWarps);
  }
#pragma unroll
  for (int stage = 0; stage < (Spec::kIsPaired ? 0 : Spec::kSecondStages); ++stage) {
    ptx::mbarrier_init(shared.second_full(stage), 1);
    ptx::mbarrier_init(shared.second_empty(stage), kConsumerWarps);
  }
  ptx::mbarrier_init_fence();
}

}  // namespace flashmoe::attention::backward::sm90
