// Compile-time description of a decoding kernel of the sm80 family.
#pragma once

#include "device/swizzle.cuh"
#include "mla/params/decode.h"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace flashmoe::mla::sm80 {

// Four warps share each group of rows: in Q K^T each sums a quarter of the head dim (every fourth step of 16 columns),
// and in P V each has a quarter of the output's columns. Their partial scores are added through shared memory; every
// warp then has all scores of its rows, and P in registers. A key block is both K and V.
// kIsSparse   1: indices select a row's keys.
// kIsFp8      1: the cache is FP8 (params/fp8.h) and is converted to elements on the way to shared memory.
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kIsFp8_, int kIsSparse_>
struct DecodeSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;

  static constexpr bool kIsFp8 = kIsFp8_ != 0;
  static constexpr bool kIsSparse = kIsSparse_ != 0;

  static constexpr int kColumnWarps = 4;
  static constexpr int kRowWarps = kNumWarps / kColumnWarps;
  static constexpr int kWarpRows = kBlockM / kRowWarps;
  static constexpr int kMmaM = kWarpRows / 16;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr int kSteps = kHeadDim / 16 / kColumnWarps;     // of Q K^T, per warp
  static constexpr int kWarpColumns = kLatentDim / kColumnWarps;  // of the output
  static constexpr int kMmaD = kWarpColumns / 8;

  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = kBlockN * kRowBytes;
  static constexpr int kScoreOffset = kNumStages * kStageBytes;
  static constexpr int kWarpScoreBytes = kMmaM * kMmaN * 32 * 16;  // a float4 per lane: conflict-free
  static constexpr int kSharedBytes = kScoreOffset + kNumWarps * kWarpScoreBytes;

  static constexpr int kRowsPerPass = kNumThreads / kSegmentChunks;  // eight threads load 64 columns of a key
  static constexpr int kPasses = kBlockN / kRowsPerPass;

  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kRowWarps * kColumnWarps == kNumWarps, "four warps share each group of rows");
  static_assert(kMmaM * 16 * kRowWarps == kBlockM, "a warp computes whole 16-row blocks");
  static_assert(kPasses * kRowsPerPass == kBlockN, "a pass of loads ends with the key block");
  static_assert(kRowsPerPass % 8 == 0, "the rows of two passes differ by the period of the swizzle");
  static_assert(!kIsSparse || kBlockN == 32, "a lane of each warp has the index of a key");
  static_assert(!kIsFp8 || kNumStages == 2, "the codes of one block at most are in registers");
  static_assert(kNumStages >= 2, "a key block is multiplied while another one loads");
};

}  // namespace flashmoe::mla::sm80
