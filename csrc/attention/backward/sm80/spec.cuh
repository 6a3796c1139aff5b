// Compile-time description of the backward kernels of the sm_80 family; the shared-memory layout is that of
// mma_sync/spec.cuh.
#pragma once

#include "attention/backward/mma_sync/spec.cuh"
#include "ptx/mma.cuh"

namespace flashmoe::attention::backward::sm80 {

template <typename Element_>
struct Product {
  using Element = Element_;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }
};

// kBlockM rows of Q and dO; blocks of kBlockN keys. kNumStages 1: one buffer each for K and V; the next V loads during
// S = Q K^T and dQ += dS K, the next K during dP = dO V^T; two barriers per block. 2 or more: a ring of pairs, loaded
// kNumStages - 1 blocks ahead; one barrier per block.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, bool kIsVarlen = false, int kScores = 0>
struct QueryGradientSpec : mma_sync::TileSpec<Product<Element>, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps,
                                              kWarpRows, 1, false, kOwnInRegisters != 0, kIsVarlen, kScores> {};

// kBlockN keys; blocks of kBlockM rows of Q and dO, in a ring.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, int kNumRoles, bool kIsVarlen = false, int kScores = 0>
struct KeyValueGradientSpec : mma_sync::TileSpec<Product<Element>, kHeadDim, kBlockN, kBlockM, kNumStages, kNumWarps,
                                                 kWarpRows, kNumRoles, true, kOwnInRegisters != 0, kIsVarlen, kScores> {
  static_assert(kNumStages >= 2, "both tensors of a block are in use until its end: one stage would hide no load");
};

// For MaskKind::kRuntime: saves what the epilogue of a tile needs, one copy per warp.
template <typename Base>
struct VarlenSpec : Base {
  static constexpr int kTileBytes = 32;
  static constexpr int kTileOffset = Base::kSharedBytes;
  static constexpr int kSharedBytes = kTileOffset + Base::kNumWarps * kTileBytes;
};

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, int kScores>
using VarlenQueryGradientSpec = VarlenSpec<QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps,
                                                             kWarpRows, kOwnInRegisters, true, kScores>>;
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, int kNumRoles, int kScores>
using VarlenKeyValueGradientSpec =
    VarlenSpec<KeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows,
                                    kOwnInRegisters, kNumRoles, true, kScores>>;

// With dropout: these take DropoutBackwardParams. kScores 1: with or without a softcap or a mask tensor; 2: a softcap
// or ALiBi.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, int kScores>
struct DropoutQueryGradientSpec : VarlenQueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps,
                                                          kWarpRows, kOwnInRegisters, kScores> {
  static constexpr bool kHasDropout = true;
};
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kWarpRows,
          int kOwnInRegisters, int kNumRoles, int kScores>
struct DropoutKeyValueGradientSpec
    : VarlenKeyValueGradientSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kWarpRows, kOwnInRegisters,
                                 kNumRoles, kScores> {
  static constexpr bool kHasDropout = true;
};

// The gradient of an additive mask: tiles of kBlockM rows and kBlockN keys.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumWarps, int kWarpRows, int kDropout>
struct BiasGradientSpec : QueryGradientSpec<Element, kHeadDim, kBlockM, kBlockN, 1, kNumWarps, kWarpRows, 0, true, 1> {
  static constexpr bool kHasDropout = kDropout != 0;
  static constexpr bool kFolds = true;  // supports masks of one row, or one key, too
  static constexpr int kMaskOffset = BiasGradientSpec::kStatisticsOffset;
  static constexpr int kSharedBytes = kMaskOffset + kBlockM * kBlockN * 2;
  static_assert(BiasGradientSpec::kSharers == 1, "a warp adds up whole rows of the tile");
};

}  // namespace flashmoe::attention::backward::sm80
