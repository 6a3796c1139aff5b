// Common to the specs of both families: how a block's tile is divided among its warps, and its shared memory.
#pragma once

#include "moe/grouped_gemm/mma_sync/schedule.cuh"
#include "moe/grouped_gemm/mma_sync/tile.cuh"

namespace flashmoe::moe::mma_sync {

// kWarpsN: warps side by side along n; kNumWarps / kWarpsN warps are stacked along m.
template <typename Element_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_, int kWarpsN_>
struct TileSpec {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kWarpsN = kWarpsN_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kWarpRows = kBlockM / (kNumWarps / kWarpsN);
  static constexpr int kWarpColumns = kBlockN / kWarpsN;
  static constexpr int kMmaM = kWarpRows / 16;
  static constexpr int kMmaN = kWarpColumns / 8;

  static constexpr int kABytes = kBlockM * kBlockK * static_cast<int>(sizeof(Element));
  static constexpr int kBBytes = kBlockN * kBlockK * static_cast<int>(sizeof(Element));
  static constexpr int kStageBytes = kABytes + kBBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;
  // The epilogue's memory, in the ring: 16 rows of fp32 per warp, each padded by 32 bytes (eight banks), and the
  // partial dots of row_dots.
  static constexpr int kStagingRowBytes = kWarpColumns * 4 + 32;
  static constexpr int kWarpStagingBytes = 16 * kStagingRowBytes;
  static constexpr int kStagingBytes = kNumWarps * kWarpStagingBytes;
  static constexpr int kSharedBytes = kRingBytes + 2 * static_cast<int>(sizeof(Tile)) + RowTiles<kBlockM>::kSharedBytes;

  static __device__ __forceinline__ int warp_row() { return ptx::warp_index() / kWarpsN * kWarpRows; }
  static __device__ __forceinline__ int warp_column() { return ptx::warp_index() % kWarpsN * kWarpColumns; }

  static_assert(sizeof(Element) == 2, "ldmatrix here takes 16-bit elements");
  static_assert(kNumWarps % kWarpsN == 0 && kWarpRows % 16 == 0, "a warp computes whole 16-row blocks");
  static_assert(kWarpColumns % 32 == 0, "a lane's share of a row in the epilogue is 8 or 16 columns");
  static_assert(kBlockM % 64 == 0 || kBlockM == 32, "tiles start at multiples of 128 bytes");
  static_assert(kBlockN == kDotColumns, "one row_dots element covers these columns");
  static_assert(kStagingBytes + kWarpsN * kBlockM * 4 <= kRingBytes, "the epilogue works in the ring");
};

}  // namespace flashmoe::moe::mma_sync
