// Grouped products where experts have few rows (decode). The weights are the M side of the product (16 of their rows a fragment),
// rows of a the N side (8 a fragment): a tile is kBlockN weight rows, streamed once over k, by up to kBlockM rows of one expert.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::moe::few_rows {

template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kBlockK_>
struct Spec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;  // rows of a
  static constexpr int kBlockN = kBlockN_;  // weight rows: of gate and up together, where there are both
  static constexpr int kBlockK = kBlockK_;  // of a stage
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;

  static constexpr int kFragments = kBlockN / (16 * kNumWarps);  // of a warp, 16 weight rows each
  static constexpr int kGroups = kBlockM / 8;                    // of rows
  static constexpr int kGroupStep = kGroups % 2 == 0 ? 2 : 1;  // as many more groups are filled and multiplied at once
  static constexpr int kPadding = 0;  // bytes behind each weight row of nk in shared memory, in place of the swizzle
  static constexpr int kWeightBytes = kBlockN * kBlockK * 2;  // of a stage; the rows follow
  static constexpr int kStageBytes = kWeightBytes + kBlockM * kBlockK * 2;

  static constexpr int kMaxExperts = 1024;
  static constexpr int kListBytes = kMaxExperts * 4;  // of TileList
  static constexpr int kWordBytes = 64;               // one word per warp, then the next tile's number
  static constexpr int kSharedBytes = kNumStages * kStageBytes + kListBytes + kWordBytes;

  static_assert(kBlockM % 8 == 0, "fragments are 8 rows wide");
  static_assert(kBlockN % (16 * kNumWarps) == 0, "every warp has as many whole fragments");
  static_assert(kBlockK % 64 == 0, "the swizzle permutes 128 bytes");
  static_assert(kNumStages >= 2, "loads run ahead of the products");
  static_assert(kNumWarps < 16, "one word per warp");
};

}  // namespace flashmoe::moe::few_rows
