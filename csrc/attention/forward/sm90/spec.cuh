// The compile-time values of one sm90 forward kernel and its shared-memory layout.
#pragma once

#include "attention/params/forward.h"
#include "device/shared_tile.cuh"
#include "ptx/mbarrier.cuh"

namespace flashmoe::attention::sm90 {

// Warpgroup 0 is the producer (it issues the TMA loads), warpgroups 1 to kBlockM / 64 are consumers with 64 rows of Q
// each.
//   kNumStages         K tiles, and V tiles, in shared memory
//   kNumQueryStages    Q tiles in shared memory; with 2 the next tile's Q is loaded before this tile ends
//   kNumOutputSlabs    64-column slabs of the output tile in shared memory; a wider output is stored in several
//                      passes. 0: the output overwrites the tile's Q, and the next tile's Q uses the other stage
//                      (varlen kernels)
//   kSplit             1: params.num_splits work items share a tile's keys and write fp32 partial results from the
//                      accumulators; kNumOutputSlabs is 0
//   kFewerValueColumns columns by which V and the output are narrower than Q and K. With more than 256 columns a tile
//                      computes kValueDim columns of the output, and kValueParts tiles, each with its own scores,
//                      compute all of them
//   kTileBytes         size of the tile record that the producer passes to the consumers
//   kSchedulerBytes, kNumSchedulerBarriers   for the producing warps only (varlen/spec.cuh)
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kNumQueryStages_, int kNumOutputSlabs_, int kSplit_ = 0, int kFewerValueColumns_ = 0,
          int kTileBytes_ = 16, int kSchedulerBytes_ = 0, int kNumSchedulerBarriers_ = 0>
struct ForwardSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;                         // of Q and K
  static constexpr int kValueDim = kHeadDim_ - kFewerValueColumns_;  // of V and the output
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumQueryStages = kNumQueryStages_;
  static constexpr int kNumOutputSlabs = kNumOutputSlabs_;
  static constexpr bool kIsSplit = kSplit_ != 0;
  static constexpr int kTileBytes = kTileBytes_;
  static constexpr bool kHasScoreMod = false;    // true in some ragged kernels (varlen/spec.cuh)
  static constexpr bool kHasAlibi = false;       // true in some ragged kernels
  static constexpr bool kHasDropout = false;     // true in some ragged kernels
  static constexpr bool kHasCodes = false;       // Q, K and V are 8-bit floats (e4m3/spec.cuh)
  static constexpr bool kConvertsCodes = false;  // K and V come from a cache of 8-bit floats (varlen/converter.cuh)
  static constexpr bool kIsTight = false;        // no register keeps what can be read or computed again
  static constexpr bool kIsFolded = false;       // chunk kernels (varlen/folded.cuh)
  static constexpr bool kStreamsMask = false;    // an additive mask's blocks are loaded with K's (varlen/spec.cuh)
  static constexpr int kValueParts = kHeadDim_ > 256 ? kHeadDim_ / kValueDim : 1;
  static constexpr int kKeyParts =
      kHeadDim_ > 256 ? 4 : 1;  // parts of a K tile, by columns, each loaded and released separately

  static constexpr int kNumConsumers = kBlockM / 64;
  static constexpr int kNumThreads = kNumWarps * 32;
  static constexpr int kNumSlabs = kHeadDim / 64;  // 64 columns, 128 bytes: the width of the swizzle
  static constexpr int kNumValueSlabs = kValueDim / 64;

  static_assert(kHeadDim % 64 == 0 && kValueDim <= 256 && kValueDim % 64 == 0 && kValueDim <= kHeadDim,
                "a tile is cut into 64-column slabs, and wgmma takes N <= 256");
  static_assert(kHeadDim % (64 * kKeyParts) == 0 && (kValueParts == 1 || kHeadDim % kValueDim == 0),
                "slices are equal");
  static_assert(kBlockM % 64 == 0 && kNumConsumers >= 1 && kNumConsumers <= 4, "a warpgroup owns 64 rows of Q");
  static_assert(kBlockN % 16 == 0 && kBlockN <= 256, "k of P V is 16, and a box has at most 256 rows");
  static_assert(kNumWarps == 4 * (kNumConsumers + 1), "one producer warpgroup and the consumers");
  static_assert(!kIsSplit || kNumOutputSlabs == 0, "partial results do not pass through shared memory");
  static_assert(kNumOutputSlabs == 0 || kNumValueSlabs % kNumOutputSlabs == 0, "the passes of the output are equal");
  static constexpr bool kHasOutputInQuery = !kIsSplit && kNumOutputSlabs == 0;
  static constexpr int kSlabsOfPass = kHasOutputInQuery ? kNumValueSlabs : kNumOutputSlabs;

  // Registers per thread, multiples of 8; 128 * (producer + consumers * consumer) <= 65536.
  static constexpr int kProducerRegisters = kNumConsumers >= 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kNumConsumers == 4 ? 112 : kNumConsumers == 3 ? 160 : 240;

  using QueryTile = SharedTile<64, kHeadDim>;            // of one warpgroup
  using OutputTile = SharedTile<64, 64 * kSlabsOfPass>;  // of one warpgroup
  using KeyTile = SharedTile<kBlockN, kHeadDim>;         // one stage of K
  using KeyPart = SharedTile<kBlockN, kHeadDim / kKeyParts>;
  using ValueTile = SharedTile<kBlockN, kValueDim>;  // one stage of V
  static constexpr int kOutputBytes = kNumOutputSlabs == 0 ? 0 : OutputTile::kBytes;

  static constexpr int kNumQueryTiles = kNumQueryStages * kNumConsumers;
  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + kNumQueryTiles * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kNumStages * KeyTile::kBytes;
  static constexpr int kOutputOffset = kValueOffset + kNumStages * ValueTile::kBytes;
  static constexpr int kTileOffset = kOutputOffset + kNumConsumers * kOutputBytes;
  static constexpr int kSchedulerOffset = kTileOffset + kNumQueryTiles * kTileBytes;
  static constexpr int kBarrierOffset = kSchedulerOffset + kSchedulerBytes_;
  static constexpr int kNumBarriers = 2 * kNumQueryTiles + (2 + 2 * kKeyParts) * kNumStages + kNumSchedulerBarriers_;
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Pointers into a block's shared memory.
template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  // The Q rows of warpgroup `consumer`.
  __device__ __forceinline__ typename Spec::QueryTile query(int stage, int consumer) const {
    return {base + Spec::kQueryOffset + (stage * Spec::kNumConsumers + consumer) * Spec::QueryTile::kBytes};
  }
  // Where warpgroup `consumer` writes the output of the tile whose Q is in query stage `stage`.
  __device__ __forceinline__ typename Spec::OutputTile output(int stage, int consumer) const {
    if constexpr (Spec::kHasOutputInQuery) return {query(stage, consumer).smem};
    return {base + Spec::kOutputOffset + consumer * Spec::kOutputBytes};
  }
  __device__ __forceinline__ typename Spec::KeyTile key(int stage) const {
    return {base + Spec::kKeyOffset + stage * Spec::KeyTile::kBytes};
  }
  __device__ __forceinline__ typename Spec::KeyPart key_part(int stage, int part) const {
    return {key(stage).slab(part * Spec::KeyPart::kNumSlabs)};
  }
  __device__ __forceinline__ typename Spec::ValueTile value(int stage) const {
    return {base + Spec::kValueOffset + stage * Spec::ValueTile::kBytes};
  }
  // The Tile (schedule.cuh) that the Q in query(stage, consumer) belongs to; guarded by the same two
  // barriers.
  __device__ __forceinline__ unsigned char* tile(int stage, int consumer) const {
    return base + Spec::kTileOffset + (stage * Spec::kNumConsumers + consumer) * Spec::kTileBytes;
  }

  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: TMA has written the buffer. empty: every consumer warp has read it for the last time.
  __device__ __forceinline__ ptx::Mbarrier* query_full(int stage, int consumer) const {
    return barrier(stage * Spec::kNumConsumers + consumer);
  }
  __device__ __forceinline__ ptx::Mbarrier* query_empty(int stage, int consumer) const {
    return query_full(stage, consumer) + Spec::kNumQueryTiles;
  }
  __device__ __forceinline__ ptx::Mbarrier* key_full(int stage, int part = 0) const {
    return barrier(2 * Spec::kNumQueryTiles + stage * Spec::kKeyParts + part);
  }
  __device__ __forceinline__ ptx::Mbarrier* key_empty(int stage, int part = 0) const {
    return key_full(Spec::kNumStages + stage, part);
  }
  __device__ __forceinline__ ptx::Mbarrier* value_full(int stage) const {
    return barrier(2 * Spec::kNumQueryTiles + 2 * Spec::kNumStages * Spec::kKeyParts + stage);
  }
  __device__ __forceinline__ ptx::Mbarrier* value_empty(int stage) const {
    return value_full(Spec::kNumStages + stage);
  }
  // Varlen kernels only. next_tile: the NextTile of the producing warps (varlen/scheduler.cuh); next_tile_full: it has
  // been written. tail_full: TMA has written V of a block that ends past the last key. next_tile_wanted: the loading
  // thread requests the next tile.
  __device__ __forceinline__ unsigned char* next_tile(int slot) const {
    return base + Spec::kSchedulerOffset + slot * Spec::kNextTileBytes;
  }
  __device__ __forceinline__ ptx::Mbarrier* next_tile_full(int slot) const {
    return value_full(2 * Spec::kNumStages) + slot;
  }
  __device__ __forceinline__ ptx::Mbarrier* tail_full(int slot) const { return next_tile_full(2 + slot); }
  __device__ __forceinline__ ptx::Mbarrier* next_tile_wanted() const { return next_tile_full(4); }
  // Only for kernels that stream a mask: a block's mask tile for the rows of warpgroup `consumer`; guarded by K's
  // barriers.
  template <typename Own = Spec>
  __device__ __forceinline__ typename Own::MaskTile mask(int stage, int consumer) const {
    return {base + Own::kMaskOffset + (stage * Spec::kNumConsumers + consumer) * Own::MaskTile::kBytes};
  }
  // Only for kernels over a cache of codes. codes: K or V as loaded by TMA (varlen/spec.cuh); code_block: the block
  // that they belong to.
  template <typename Own = Spec>
  __device__ __forceinline__ typename Own::CodeTile codes(int slot) const {
    return {base + Own::kCodeOffset + slot * Own::CodeTile::kBytes};
  }
  __device__ __forceinline__ unsigned char* code_block(int slot) const {
    return base + Spec::kCodeBlockOffset + slot * 16;
  }
  __device__ __forceinline__ ptx::Mbarrier* codes_full(int slot) const { return next_tile_full(5 + slot); }
  __device__ __forceinline__ ptx::Mbarrier* codes_empty(int slot) const { return next_tile_full(7 + slot); }
};

}  // namespace flashmoe::attention::sm90
