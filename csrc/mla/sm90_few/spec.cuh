// The compile-time values of a decoding kernel for few rows, and its shared-memory map.
#pragma once

#include "device/shared_tile.cuh"
#include "mla/params/fp8.h"
#include "mla/params/decode.h"
#include "ptx/mbarrier.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe::mla::sm90_few {

// Products are transposed: keys, and columns of the output, are the 64 rows of a wgmma, and kBlockM heads are its
// columns, so that nothing is padded. A ring of groups of three slabs (64 keys x 64 columns each) holds as many keys as
// fit, because few rows are bound by the bytes in flight. A key block is three groups: columns 0 to 191, 192 to 383,
// and 384 to 511 with the rotary ones.
// kFp8Stages    stages of 16 keys of an FP8 cache (params/fp8.h), which converter.cuh converts; 0: a 16-bit cache.
// kIsSparse     1: indices select the keys, gathered by cp.async: by gatherer.cuh, with FP8 by the converting warps.
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kFp8Stages_,
          int kIsSparse_>
struct DecodeSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kRowTiles = kBlockM == 16 ? 2 : 1;  // per sequence, at most: 32 rows over few keys are two
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;  // groups
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kConsumerWarps = 4;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kFp8Stages = kFp8Stages_;
  static constexpr bool kIsFp8 = kFp8Stages > 0;
  static constexpr bool kIsSparse = kIsSparse_ != 0;
  static constexpr int kHelperWarps = kIsFp8 || kIsSparse ? 4 : 0;  // convert, or gather
  static constexpr int kStageKeys = 16;
  static constexpr int kFp8StagesPerBlock = kBlockN / kStageKeys;

  static constexpr int kGroupSlabs = 3;
  static constexpr int kNumGroups = kHeadDim / kSlabColumns / kGroupSlabs;  // per key block
  static constexpr int kValueSlabs = kLatentDim / kSlabColumns;
  static constexpr int kHeadsOfThread = kBlockM / 4;
  static constexpr int kSums = kBlockM / 2;  // accumulators per thread for each 64 rows of a product

  using QueryTile = SharedTile<kBlockM, kHeadDim>;
  using GroupTile = SharedTile<kBlockN, kGroupSlabs * kSlabColumns>;
  using ProbabilityTile = SharedTile<kBlockM, kBlockN>;

  static constexpr int kKeyOffset = 0;
  static constexpr int kQueryOffset = kKeyOffset + kNumStages * GroupTile::kBytes;
  static constexpr int kProbabilityOffset = kQueryOffset + QueryTile::kBytes;
  static constexpr int kMaxOffset = kProbabilityOffset + ProbabilityTile::kBytes;  // [4][kBlockM]: over a warp's keys
  static constexpr int kSumOffset = kMaxOffset + kConsumerWarps * kBlockM * 4;     // [4][kBlockM]
  static constexpr int kFp8Offset = kSumOffset + kConsumerWarps * kBlockM * 4;     // [kFp8Stages][16][656 bytes]
  static constexpr int kFp8StageBytes = kStageKeys * kFp8KeyBytes;
  static constexpr int kBarrierOffset = kFp8Offset + kFp8Stages * kFp8StageBytes;
  static constexpr int kSharedBytes = kBarrierOffset + (2 + 2 * kNumStages + 2 * kFp8Stages) * 8;

  static_assert(kBlockN == 64, "keys are the rows of a wgmma");
  static_assert(kBlockM == 8 || kBlockM == 16, "more rows are no faster than in the tile of 64");
  static_assert(kNumGroups * kGroupSlabs * kSlabColumns == kHeadDim, "a key block is whole groups");
  static_assert(kNumStages > kNumGroups, "a key block is multiplied while another one loads");
  static_assert(kNumWarps == kConsumerWarps + 1 + kHelperWarps,
                "a warpgroup that multiplies, a warp that loads, and of codes or indices one for 16 keys of a block");
  static_assert(!kIsFp8 || kFp8Stages > kFp8StagesPerBlock, "a key block is converted while another one loads");
  static_assert(kFp8Stages % kFp8StagesPerBlock == 0, "a stage has one warp, which waits for each of its phases");
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// The row tile of this block: the blocks of the second tile follow those of the first.
template <typename Spec>
__device__ __forceinline__ int row_tile_of(const DecodeParams& params) {
  return Spec::kRowTiles == 1 || ptx::block_index() < params.num_sm_parts ? 0 : 1;
}

// Named barriers besides number 0.
enum class Barrier : int {
  kConsumers = 1,  // 128 threads. Read after write: maxima, P, zeros, sums; write after read: P of the block before
};

template <typename Spec>
struct SharedMemory {
  unsigned char* base;

  __device__ __forceinline__ typename Spec::GroupTile group(int stage) const {
    return {base + Spec::kKeyOffset + stage * Spec::GroupTile::kBytes};
  }
  __device__ __forceinline__ typename Spec::QueryTile query() const { return {base + Spec::kQueryOffset}; }
  __device__ __forceinline__ typename Spec::ProbabilityTile probability() const {
    return {base + Spec::kProbabilityOffset};
  }
  __device__ __forceinline__ ptx::SmemPointer head_max(int warp, int head) const {
    return base + Spec::kMaxOffset + (warp * Spec::kBlockM + head) * 4;
  }
  __device__ __forceinline__ ptx::SmemPointer head_sum(int warp, int head) const {
    return base + Spec::kSumOffset + (warp * Spec::kBlockM + head) * 4;
  }
  __device__ __forceinline__ ptx::Mbarrier* barrier(int index) const {
    return reinterpret_cast<ptx::Mbarrier*>(base + Spec::kBarrierOffset) + index;
  }
  // full: written by TMA, with FP8 by the converters, with indices by the gatherers. empty: every consumer warp has
  // read it for the last time.
  __device__ __forceinline__ ptx::Mbarrier* query_full() const { return barrier(0); }
  __device__ __forceinline__ ptx::Mbarrier* query_empty() const { return barrier(1); }
  __device__ __forceinline__ ptx::Mbarrier* key_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ ptx::Mbarrier* key_empty(int stage) const { return key_full(Spec::kNumStages + stage); }
  // 16 keys as they are in the cache. full: TMA has written them. empty: their converters have read them.
  __device__ __forceinline__ unsigned char* fp8(int stage) const {
    return base + Spec::kFp8Offset + stage * Spec::kFp8StageBytes;
  }
  __device__ __forceinline__ ptx::Mbarrier* fp8_full(int stage) const { return key_empty(Spec::kNumStages + stage); }
  __device__ __forceinline__ ptx::Mbarrier* fp8_empty(int stage) const { return fp8_full(Spec::kFp8Stages + stage); }
};

}  // namespace flashmoe::mla::sm90_few
