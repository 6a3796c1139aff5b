// Compile-time description of one forward kernel of the sm_75 family, and its shared memory.
#pragma once

#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace flashmoe::attention::sm75 {

// kNumStages is 1: without cp.async a tile in flight occupies registers, and 64 KiB have no room for a second one.
// kQueryInRegisters is as in the sm_80 family. kSplit is not supported.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kQueryInRegisters_, int kSplit_>
struct ForwardSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr bool kQueryInRegisters = kQueryInRegisters_ != 0;
  static constexpr bool kIsSplit = false;
  static constexpr bool kHasAlibi = false;
  static constexpr bool kHasDropout = false;

  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kWarpRows = kBlockM / kNumWarps;
  static constexpr int kMmaM = kWarpRows / 16;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr int kMmaD = kHeadDim / 8;

  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kQueryBytes = kBlockM * kRowBytes;  // reused for the output tile
  static constexpr int kKeyBytes = kBlockN * kRowBytes;    // one tile of K or V
  static constexpr int kSharedBytes = kQueryBytes + 2 * kKeyBytes;

  // 16x8x16 in two halves of k: Turing's largest 16-bit product is 16x8x8.
  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k8<Element>(d, a[0], a[1], b0);
    ptx::mma_m16n8k8<Element>(d, a[2], a[3], b1);
  }

  static_assert(kNumStages_ == 1, "this family keeps one K tile and one V tile in shared memory");
  static_assert(kSplit_ == 0, "this family has no split kernels");
  static_assert(sizeof(Element) == 2, "ldmatrix here takes 16-bit elements");
  static_assert(kSharedBytes <= 65536, "a Turing multiprocessor has 64 KiB of shared memory");
  static_assert(kHeadDim % 64 == 0, "the swizzle permutes within 64 columns");
  static_assert(kWarpRows * kNumWarps == kBlockM && kWarpRows % 16 == 0, "a warp computes whole 16-row blocks");
  static_assert(kBlockN % 16 == 0, "ldmatrix.x4 reads 16 keys at a time");
  static_assert(kNumWarps >= 2,
                "the rows of two load passes must differ by a multiple of 8, the period of the swizzle");
  static_assert(kBlockM % (kNumThreads / 8) == 0 && kBlockN % (kNumThreads / 8) == 0,
                "eight threads load 64 columns of a row: a pass must end with the tile");
};

// For MaskKind::kRuntime. kAlibi 1: ALiBi instead of mask tensors.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps,
          int kQueryInRegisters, int kSplit, int kAlibi>
struct VarlenForwardSpec
    : ForwardSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, kSplit> {
  static constexpr bool kHasAlibi = kAlibi != 0;
};

// With dropout: takes DropoutForwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps,
          int kQueryInRegisters, int kAlibi>
struct DropoutForwardSpec
    : VarlenForwardSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, 0, kAlibi> {
  static constexpr bool kHasDropout = true;
};

}  // namespace flashmoe::attention::sm75
