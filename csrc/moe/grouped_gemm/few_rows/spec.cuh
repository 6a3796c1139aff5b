// Grouped products for few rows per expert (decode). The weights are the M side of the product (16 weight rows per
// fragment), rows of a the N side (8 per fragment): a tile is kBlockN weight rows, streamed once over k, by up to
// kBlockM rows of one expert.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::moe::few_rows {

template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kBlockK_>
struct Spec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;  // rows of a
  static constexpr int kBlockN = kBlockN_;  // weight rows; gate and up counted together
  static constexpr int kBlockK = kBlockK_;  // per stage
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;

  static constexpr int kFragments = kBlockN / (16 * kNumWarps);  // per warp, 16 weight rows each
  static constexpr int kGroups = kBlockM / 8;                    // of 8 rows
  static constexpr int kGroupStep = kGroups % 2 == 0 ? 2 : 1;  // groups are filled and multiplied in multiples of this
  static constexpr int kPadding = 0;  // bytes after each weight row of nk in shared memory, instead of the swizzle
  static constexpr int kWeightBytes = kBlockN * kBlockK * 2;  // per stage; the rows follow
  static constexpr int kStageBytes = kWeightBytes + kBlockM * kBlockK * 2;

  static constexpr int kMaxExperts = 1024;
  static constexpr int kListBytes = kMaxExperts * 4;  // of TileList
  static constexpr int kWordBytes = 64;               // one word per warp, then the next tile's index
  static constexpr int kSharedBytes = kNumStages * kStageBytes + kListBytes + kWordBytes;

  static_assert(kBlockM % 8 == 0, "fragments are 8 rows wide");
  static_assert(kBlockN % (16 * kNumWarps) == 0, "every warp has the same number of whole fragments");
  static_assert(kBlockK % 64 == 0, "the swizzle permutes 128 bytes");
  static_assert(kNumStages >= 2, "loads run ahead of the products");
  static_assert(kNumWarps < 16, "one word per warp");
};

}  // namespace flashmoe::moe::few_rows
