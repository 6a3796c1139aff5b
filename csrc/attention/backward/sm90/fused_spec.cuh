// The fused kernel's (fused.cuh) specs, shared memory, and the order in which its tiles add to the partials of dq.
#pragma once

#include "attention/backward/sm90/dq_partials.cuh"
#include "attention/backward/sm90/key_value_consumer.cuh"
#include "attention/params/fused_backward.h"

namespace flashmoe::attention::backward::sm90 {

// Like the spec of dk and dv, with 16 warps: producer and reducing warps, two consumers, the dq warpgroup; or with 12,
// without the last.
//   kIsMasked_   the ring's stages also hold an additive mask's blocks, next to those of Q and dO
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps_,
          bool kIsVarlen_ = false, int kAlibi_ = 0, bool kIsMasked_ = false>
struct FusedSpec : KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0, kIsVarlen_> {
  using Base = KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, 12, 0, 0, kIsVarlen_>;
  static constexpr bool kStoresGradient = false;
  static constexpr bool kHasAlibi = kAlibi_ != 0;   // without a softcap, unlike in the split kernels
  static constexpr bool kIsWide = kHeadDim == 128;  // no dq warpgroup: the consumers do its work (fused_wide.cuh)
  static_assert(kHeadDim <= 128, "dk and dv of more columns need more registers than there are");
  static_assert(kNumWarps_ == (kIsWide ? 12 : 16) && kBlockM == 64 && kBlockN == kFusedTileKeys,
                "two consumers of 64 keys, dQ of one product's 64 rows");
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr bool kOrdersReduction = true;
  static constexpr int kTileReaders = !kIsVarlen_ ? 0 : kIsWide ? 1 : 5;  // the statistics warp; the four dq warps
  static constexpr int kSectionHeads = kIsWide ? 16 : 0;        // eight tiles of each in flight on 132 multiprocessors
  static constexpr int kProducerRegisters = kIsWide ? 24 : 32;  // 128 * (32 + 2 * 208 + 64) = 65536
  static constexpr int kConsumerRegisters = kIsWide ? 240 : 208;
  static constexpr int kQueryRegisters = 64;

  static constexpr int kQueryBuffers = 2;                            // of dS^T
  static constexpr int kSumBuffers = kIsMasked_ && kIsWide ? 1 : 2;  // of dQ; a mask takes the place of the second
  using ScoreTile = SharedTile<kBlockN, kBlockM>;                    // dS^T of a block
  static constexpr int kScoreBytes = ScoreTile::kBytes;
  static constexpr int kQueryBytes = kBlockM * kHeadDim * 4;  // dQ of a block
  static constexpr int kScoreOffset = (Base::kSharedBytes + 1023) / 1024 * 1024;
  static constexpr int kQueryOffset = kScoreOffset + kQueryBuffers * kScoreBytes;
  using MaskTile = SharedTile<kBlockM, kBlockN>;  // a slab for each consumer
  static constexpr int kMaskBytes = kIsMasked_ ? MaskTile::kBytes : 0;
  static constexpr int kMaskOffset = kQueryOffset + kSumBuffers * kQueryBytes;
  static constexpr int kScoreBarrierOffset = kMaskOffset + kNumStages * kMaskBytes;
  static constexpr int kSharedBytes = kScoreBarrierOffset + kQueryBuffers * (4 * 8 + 16);
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// For MaskKind::kRuntime.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kAlibi>
using VarlenFusedSpec = FusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, true, kAlibi>;

// The same with dropout; takes DropoutBackwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kAlibi>
struct DropoutFusedSpec : VarlenFusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kAlibi> {
  using Fused = VarlenFusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kAlibi>;
  static constexpr bool kHasDropout = true;
  static constexpr int kNumDrawers = Fused::kIsWide ? 0 : 4;         // the dq warpgroup, if there is one
  static constexpr int kDrawnBytes = Fused::kIsWide ? 0 : 2 * 4096;  // per block: of both consumers (FusedDropout)
  static constexpr int kDrawnOffset = Fused::kScoreBarrierOffset;
  static constexpr int kScoreBarrierOffset = kDrawnOffset + kNumStages * kDrawnBytes;
  static constexpr int kDrawnBarrierOffset = kScoreBarrierOffset + Fused::kQueryBuffers * (4 * 8 + 16);
  static constexpr int kSharedBytes = kDrawnBarrierOffset + (kNumDrawers == 0 ? 0 : 2 * kNumStages * 8);
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// The same with an additive mask that has an element for each row and key; without a softcap. kGradient_: the mask's
// gradient is stored.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kGradient_>
struct MaskFusedSpec : FusedSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, true, 0, true> {
  static constexpr bool kStoresGradient = kGradient_ != 0;
};

template <typename Spec>
struct FusedMemory : SharedMemory<Spec> {
  using SharedMemory<Spec>::base;

  // dS^T, [128 keys][64 queries], half from each consumer.
  __device__ __forceinline__ typename Spec::ScoreTile scores(int buffer) const {
    return {base + Spec::kScoreOffset + buffer * Spec::kScoreBytes};
  }
  // dS as the left operand of dQ's products; one slab.
  __device__ __forceinline__ MnMajorOperand score_operand(int buffer) const {
    return {ptx::make_smem_descriptor(scores(buffer).smem, 0, kSwizzleBytes)};
  }
  // A partial of dq, in the order of FusedQueries::publish_sums.
  __device__ __forceinline__ unsigned char* query_sums(int buffer) const {
    return base + Spec::kQueryOffset + buffer * Spec::kQueryBytes;
  }
  // [64 queries][128 keys] of the mask, for the block in first(stage).
  __device__ __forceinline__ typename Spec::MaskTile mask(int stage) const {
    return {base + Spec::kMaskOffset + stage * Spec::kMaskBytes};
  }
  // With dropout: FusedDropout's words of `consumer` for the block in first(stage). They have separate barriers: the
  // words are needed later than Q, and their slot is free once dS^T is computed, before the products with it are done.
  __device__ __forceinline__ unsigned char* drawn(int stage, int consumer) const {
    return base + Spec::kDrawnOffset + stage * Spec::kDrawnBytes + consumer * (Spec::kDrawnBytes / 2);
  }
  __device__ __forceinline__ ptx::Mbarrier* drawn_full(int stage) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kDrawnBarrierOffset) + stage;
  }
  __device__ __forceinline__ ptx::Mbarrier* drawn_empty(int stage) const {
    return drawn_full(Spec::kFirstStages + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_full(int buffer) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kScoreBarrierOffset) + buffer;
  }
  __device__ __forceinline__ ptx::Mbarrier* scores_empty(int buffer) const {
    return scores_full(Spec::kQueryBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_full(int buffer) const {
    return scores_full(2 * Spec::kQueryBuffers + buffer);
  }
  __device__ __forceinline__ ptx::Mbarrier* sums_empty(int buffer) const {
    return scores_full(3 * Spec::kQueryBuffers + buffer);
  }
  // The number of the partial that query_sums(buffer) belongs to, or -1, and this tile's rank in it; guarded by the
  // same barriers.
  __device__ __forceinline__ unsigned char* partial_record(int buffer) const {
    return base + Spec::kScoreBarrierOffset + Spec::kQueryBuffers * 4 * 8 + 16 * buffer;
  }
};

// K of both consumers' own tiles, from a slab on, as the right operand of dQ = dS K: four k steps for each.
template <typename Spec>
struct TileKeys {
  static constexpr bool kIsTransposed = true;
  uint64_t descriptor;

  __device__ __forceinline__ TileKeys(const unsigned char* smem)
      : descriptor(ptx::make_smem_descriptor(smem, Spec::OwnTile::kSlabBytes, kSwizzleBytes)) {}
  __device__ __forceinline__ uint64_t k_step(int step) const {
    return ptx::advance_smem_descriptor(descriptor, step / 4 * 2 * Spec::kOwnBytes + step % 4 * 16 * kSlabRowBytes);
  }
};

// Whether some of the 64 keys from first_key on are past the last.
__device__ __forceinline__ bool has_missing_keys(const BackwardParams& params, const Tile&, int first_key) {
  return first_key + 64 > params.seq_k;
}
__device__ __forceinline__ bool has_missing_keys(const BackwardParams&, const VarlenTile& tile, int first_key) {
  return first_key + 64 > tile.extents.key_count;
}

// Blocks of a tile's heads that see only the other consumer's keys, before and after a consumer's own range.
struct SkippedBlocks {
  int before;
  int behind;
};
__device__ __forceinline__ SkippedBlocks skipped_blocks(const Tile&, const BlockRange& own, const BlockRange& all,
                                                        int heads) {
  return SkippedBlocks{heads * (own.begin - all.begin), 0};
}
__device__ __forceinline__ SkippedBlocks skipped_blocks(const VarlenTile&, const BlockRange& own, const BlockRange& all,
                                                        int heads) {
  if (own.begin >= own.end) return SkippedBlocks{heads * (all.end - all.begin), 0};
  return SkippedBlocks{heads * (own.begin - all.begin), heads * (all.end - own.end)};
}

// The number of the first partial of a tile's sequence and head.
__device__ __forceinline__ int first_partial(const BackwardParams& params, const Tile& tile, int head) {
  return (tile.batch * params.heads_q + head) * ceil_div(params.seq_q, kDqPartialRows);
}
__device__ __forceinline__ int first_partial(const BackwardParams& params, const VarlenTile& tile, int head) {
  const DqPartials partials = dq_partials(params);
  return head * partials.count() + partials.first(tile.batch, tile.extents.first_row);
}

// The tile of the last keys that any row of block `block` sees; the block must see some.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int last_tile(const BackwardParams& params, int block) {
  const int end_key = visible_keys<kMask>(params, Lengths{params}, (block + 1) * Spec::kStreamRows - 1).end;
  return static_cast<int>(static_cast<uint32_t>(end_key - 1) / Spec::kOwnRows);
}

// The number of tiles that add to a partial before this one.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int reduction_rank(const BackwardParams& params, const Tile& tile, int block) {
  return is_descending<kMask>(tile) ? tile.index : last_tile<Spec, kMask>(params, block) - tile.index;
}
// Varlen: tiles whose query_blocks include the block add to it, up to the last tile that its last row sees; that row
// may be past the sequence's end, because blocks are counted whole. Descending tiles have no window that would exclude
// earlier tiles.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int reduction_rank(const BackwardParams& params, const VarlenTile& tile, int block) {
  if (is_descending<kMask>(tile)) return tile.index;
  // The window of a row past the last may begin after the last key.
  const int end_key = window_keys(params.score_options, tile.extents, (block + 1) * Spec::kStreamRows - 1).end;
  return (minimum(end_key, tile.extents.keys()) - 1) / Spec::kOwnRows - tile.index;
}

}  // namespace flashmoe::attention::backward::sm90
