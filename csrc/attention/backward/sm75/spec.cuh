// Compile-time description of the backward kernels for Turing; the shared-memory layout is that of mma_sync/spec.cuh.
#pragma once

#include "attention/backward/mma_sync/spec.cuh"
#include "ptx/mma.cuh"

namespace flashmoe::attention::backward::sm75 {

// 16x8x16 in two halves of k: Turing's largest 16-bit product is 16x8x8.
template <typename Element_>
struct Product {
  using Element = Element_;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k8<Element>(d, a[0], a[1], b0);
    ptx::mma_m16n8k8<Element>(d, a[2], a[3], b1);
  }
};

// kBlockM rows of Q and dO; blocks of kBlockN keys.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          bool kIsVarlen = false, int kScores = kIsVarlen ? 1 : 0>
struct QueryGradientSpec : mma_sync::TileSpec<Product<Element>, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps,
                                              kWarpRows, 1, false, false, kIsVarlen, kScores, kIsVarlen> {
  static_assert(kNumStages == 1, "this family has one block of the stream in shared memory");
  static_assert(QueryGradientSpec::kSharedBytes <= 65536, "a Turing multiprocessor has 64 KiB of shared memory");
};

// kBlockN keys; blocks of kBlockM rows of Q and dO.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          bool kIsVarlen = false, int kScores = kIsVarlen ? 1 : 0>
struct KeyValueGradientSpec : mma_sync::TileSpec<Product<Element>, kHeadDim, kBlockN, kBlockM, kNumStages, kNumWarps,
                                                 kWarpRows, 2, true, false, kIsVarlen, kScores, kIsVarlen> {
  static_assert(kNumStages == 1, "this family has one block of the stream in shared memory");
  static_assert(KeyValueGradientSpec::kSharedBytes <= 65536, "a Turing multiprocessor has 64 KiB of shared memory");
};

// For MaskKind::kRuntime: the same kernel with and without a softcap or a mask tensor.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kAlibi>
using VarlenQueryGradientSpec =
    QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows, true, 1 + kAlibi>;
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kAlibi>
using VarlenKeyValueGradientSpec =
    KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows, true, 1 + kAlibi>;

// With dropout: these take DropoutBackwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kAlibi>
struct DropoutQueryGradientSpec
    : VarlenQueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows, kAlibi> {
  static constexpr bool kHasDropout = true;
};
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kAlibi>
struct DropoutKeyValueGradientSpec
    : VarlenKeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows, kAlibi> {
  static constexpr bool kHasDropout = true;
};

// The gradient of an additive mask: tiles of kBlockM rows and kBlockN keys.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumWarps, int kWarpRows, int kDropout>
struct BiasGradientSpec : QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, 1, kNumWarps, kWarpRows, true, 1> {
  static constexpr bool kHasDropout = kDropout != 0;
  static constexpr bool kFolds = true;  // supports masks of one row, or one key, too
  static constexpr bool kServesPlain = false;
  static constexpr int kMaskOffset = BiasGradientSpec::kStatisticsOffset;
  static constexpr int kSharedBytes = kMaskOffset + kBlockM * kBlockN * 2;
  static_assert(BiasGradientSpec::kSharers == 1, "a warp adds up whole rows of the tile");
};

}  // namespace flashmoe::attention::backward::sm75
