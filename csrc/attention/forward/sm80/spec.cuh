// Compile-time description of one forward kernel of the sm_80 family, and its shared memory.
#pragma once

#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe::attention::sm80 {

// kNumStages          1: one buffer each for K and V; the next K loads during softmax and P V, V during Q K^T; two
//                     barriers per tile. 2 or more: a ring of (K, V) pairs, loaded kNumStages - 1 tiles ahead; one
//                     barrier per tile.
// kQueryInRegisters   1: a warp reads its Q rows once and keeps them; 0, to save registers: it reads them per tile.
// kSplit              1: params.num_splits blocks share a query tile's keys and write fp32 partial results.
// kMaskedLoop         1: tiles that need a mask have their own loop; 0: one loop, which is half the code.
// kColumnWarps        number of warps that share rows. Each has a part of the head dim, for which it computes terms of
//                     the scores and columns of the output. The terms pass through shared memory, and each warp adds
//                     them up itself, all in the same order.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kQueryInRegisters_, int kSplit_, int kMaskedLoop_, int kColumnWarps_ = 1>
struct ForwardSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr bool kQueryInRegisters = kQueryInRegisters_ != 0;
  static constexpr bool kIsSplit = kSplit_ != 0;
  static constexpr bool kHasMaskedLoop = kMaskedLoop_ != 0;
  static constexpr bool kHasAlibi = false;
  static constexpr bool kHasDropout = false;

  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kColumnWarps = kColumnWarps_;
  static constexpr int kWarpRows = kBlockM / (kNumWarps / kColumnWarps);
  static constexpr int kWarpColumns = kHeadDim / kColumnWarps;
  static constexpr int kMmaM = kWarpRows / 16;    // 16-row blocks of a warp
  static constexpr int kMmaN = kBlockN / 8;       // 8-column blocks of the scores
  static constexpr int kMmaD = kWarpColumns / 8;  // 8-column blocks of the warp's output

  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kQueryBytes = kBlockM * kRowBytes;  // reused for the output tile
  static constexpr int kKeyBytes = kBlockN * kRowBytes;    // one stage of K, or of V
  static constexpr int kTermOffset = kQueryBytes + 2 * kNumStages * kKeyBytes;
  static constexpr int kTermBytes = kWarpRows * kBlockN * 4;  // per warp, if warps share rows
  static constexpr int kSharedBytes = kTermOffset + (kColumnWarps > 1 ? kNumWarps * kTermBytes : 0);

  // Of the calling warp.
  static __device__ __forceinline__ int row_group() { return ptx::warp_index() / kColumnWarps; }
  static __device__ __forceinline__ int warp_row() { return row_group() * kWarpRows; }
  static __device__ __forceinline__ int column_part() { return ptx::warp_index() % kColumnWarps; }
  // Byte offset of its columns in a row. They are whole segments of the swizzle.
  static __device__ __forceinline__ int column_bytes() {
    return kColumnWarps == 1 ? 0 : column_part() * (kWarpColumns * static_cast<int>(sizeof(Element)));
  }

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(!(kIsSplit && kHasMaskedLoop), "KeyTiles::full_end does not account for splits");
  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kWarpColumns % 64 == 0 && kWarpColumns * kColumnWarps == kHeadDim,
                "the swizzle permutes within 64 columns");
  static_assert(kNumWarps % kColumnWarps == 0, "every row group needs the same number of warps");
  static_assert(kWarpRows * (kNumWarps / kColumnWarps) == kBlockM && kWarpRows % 16 == 0,
                "a warp computes whole 16-row blocks");
  static_assert(kBlockN % 16 == 0, "ldmatrix.x4 reads 16 keys at a time");
  static_assert(kNumWarps >= 2,
                "the rows of two load passes must differ by a multiple of 8, the period of the swizzle");
  static_assert(kBlockM % (kNumThreads / 8) == 0 && kBlockN % (kNumThreads / 8) == 0,
                "eight threads load 64 columns of a row: a pass must end with the tile");
};

// For MaskKind::kRuntime.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps,
          int kQueryInRegisters, int kSplit, int kMaskedLoop, int kAlibi, int kColumnWarps = 1>
struct VarlenForwardSpec : ForwardSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters,
                                       kSplit, kMaskedLoop, kColumnWarps> {
  using Base = ForwardSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, kSplit,
                           kMaskedLoop, kColumnWarps>;
  static constexpr bool kHasAlibi = kAlibi != 0;  // ALiBi instead of mask tensors
  static constexpr int kTileBytes = 32;           // per warp: SavedTile
  static constexpr int kTileOffset = Base::kSharedBytes;
  static constexpr int kSharedBytes = kTileOffset + kNumWarps * kTileBytes;
};

// With dropout: takes DropoutForwardParams.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps,
          int kQueryInRegisters, int kAlibi>
struct DropoutForwardSpec
    : VarlenForwardSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kQueryInRegisters, 0, 0, kAlibi> {
  static constexpr bool kHasDropout = true;
};

}  // namespace flashmoe::attention::sm80
