// Shared by the specs of the dq kernels and the dk, dv kernels of both families.
//
// A group of warps owns kWarpRows rows: of Q and dO in the dq kernel, of K and V in the dk, dv kernel. The rows of the
// other two tensors stream past in blocks. "First" is the pair whose product gives the scores, Q and K; "second" the
// pair whose product gives dP, dO and V.
//   query_gradient       Q, dO                        K, V
//   key_value_gradient   K, V                         Q, dO
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::attention::backward::mma_sync {

//   Product_          the family's element type and 16x8x16 product
//   kOwnRows          rows that a thread block owns
//   kStreamRows       rows of one block of the stream
//   kNumStages        blocks of the stream in shared memory
//   kWarpRows         16 or 32. A fragment read from shared memory as the right operand is used for kWarpRows / 16
//                     products
//   kRoles            2: half of the warps compute the scores and dv, the other half dP and dk, each for all rows.
//                     1: every warp computes everything for its rows
//   kStreamsQueries   the stream is Q and dO of a group's heads, with two statistics per row
//   kIsVarlen         for MaskKind::kRuntime
//   kScores           varlen, 1: with a softcap or a mask tensor (kHasScoreMod); 2: with a softcap or ALiBi
//   kServesPlain      also without them: the family's only varlen kernel
//   kOwnInRegisters   a warp holds its own rows as operands in registers; otherwise it reads them for every block
// kSharers warps of one role divide a group's work: each takes a slice of a block's rows for the scores, and a slice of
// the gradient's columns.
template <typename Product_, int kHeadDim_, int kOwnRows_, int kStreamRows_, int kNumStages_, int kNumWarps_,
          int kWarpRows_, int kRoles_, bool kStreamsQueries_, bool kOwnInRegisters_, bool kIsVarlen_ = false,
          int kScores_ = 0, bool kServesPlain_ = false>
struct TileSpec {
  using Product = Product_;
  using Element = typename Product::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kOwnRows = kOwnRows_;
  static constexpr int kStreamRows = kStreamRows_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kWarpRows = kWarpRows_;
  static constexpr int kRoles = kRoles_;
  static constexpr bool kStreamsQueries = kStreamsQueries_;
  static constexpr bool kHasStatistics = kStreamsQueries_;  // the name in score_mod.cuh
  static constexpr bool kIsVarlen = kIsVarlen_;
  static constexpr bool kHasScoreMod = kScores_ != 0;
  static constexpr bool kHasAlibi = kScores_ == 2;
  static constexpr bool kServesPlain = kServesPlain_;
  static constexpr bool kHasDropout = false;
  static constexpr bool kQueryInRegisters = kOwnInRegisters_;  // the name in forward/mma_sync/multiply.cuh

  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kNumGroups = kOwnRows / kWarpRows;
  static constexpr int kRoleWarps = kNumWarps / kRoles;
  static constexpr int kSharers = kRoleWarps / kNumGroups;
  static constexpr int kWarpStreamRows = kStreamRows / kSharers;
  static constexpr int kWarpColumns = kHeadDim / kSharers;
  static constexpr int kMmaM = kWarpRows / 16;       // 16-row blocks per warp
  static constexpr int kMmaN = kWarpStreamRows / 8;  // 8-column blocks of its scores
  static constexpr int kMmaD = kWarpColumns / 8;     // 8-column blocks of its gradient

  // Bytes.
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kOwnBytes = kOwnRows * kRowBytes;        // per tensor; reused for a gradient
  static constexpr int kStreamBytes = kStreamRows * kRowBytes;  // per tensor and stage
  static constexpr int kGroupOperandBytes = kWarpRows * kStreamRows * static_cast<int>(sizeof(Element));
  static constexpr int kOperandBytes = kNumGroups * kGroupOperandBytes;  // P or dS of a block
  // With two roles P passes from one role to the other; with two sharers dS, and P too, passes to the warp that
  // computes the other columns.
  static constexpr int kNumOperands = (kRoles == 2 ? 1 : 0) + (kSharers > 1 ? 1 : 0);
  static constexpr int kStatisticsBytes = kStreamsQueries ? 2 * kStreamRows * 4 : 0;  // per stage

  static constexpr int kStreamOffset = 2 * kOwnBytes;
  static constexpr int kOperandOffset = kStreamOffset + 2 * kNumStages * kStreamBytes;
  static constexpr int kStatisticsOffset = kOperandOffset + kNumOperands * kOperandBytes;
  static constexpr int kSharedBytes = kStatisticsOffset + kNumStages * kStatisticsBytes;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    Product::multiply(d, a, b0, b1);
  }

  static_assert(sizeof(Element) == 2, "ldmatrix here takes 16-bit elements");
  static_assert(kHeadDim % 64 == 0, "the swizzle permutes within 64 columns");
  static_assert(kWarpRows % 16 == 0 && kNumGroups * kWarpRows == kOwnRows, "a warp computes whole 16-row blocks");
  static_assert(kSharers >= 1 && kSharers <= 2 && kRoles * kNumGroups * kSharers == kNumWarps,
                "one or two warps of a role share a group's rows");
  static_assert(kWarpStreamRows % 16 == 0, "ldmatrix.x4 reads 16 rows of the stream at a time");
  static_assert(kWarpColumns % 64 == 0, "a warp stores whole 64-column segments of a gradient");
  static_assert(!kHasScoreMod || kSharers == 1, "P of a softcap's dS is not that of dV, and sharing warps pass one on");
  static_assert(kNumWarps >= 2,
                "the rows of two load passes must differ by a multiple of 8, the period of the swizzle");
  static_assert(kOwnRows % (kNumThreads / 8) == 0 && kStreamRows % (kNumThreads / 8) == 0,
                "eight threads load 64 columns of a row: a pass must end with the tile");
  static_assert(!kStreamsQueries || 2 * kStreamRows <= kNumThreads, "a thread fetches one statistic of a block");
  static_assert((kRoles == 1 ? 1 : 2) * kNumGroups < 16, "a group has barriers of its own, and there are 16");
};

// This warp's share of the tile.
template <typename Spec>
struct WarpCoordinates {
  int role;   // 0: scores and dv, 1: dP and dk; 0 if there is only one role
  int group;  // of rows
  int slice;  // of the stream's rows and of the columns

  __device__ __forceinline__ explicit WarpCoordinates(int warp)
      : role(warp / Spec::kRoleWarps), group(warp % Spec::kRoleWarps / Spec::kSharers), slice(warp % Spec::kSharers) {}

  __device__ __forceinline__ int first_row() const { return group * Spec::kWarpRows; }
  __device__ __forceinline__ int first_column() const { return slice * Spec::kWarpColumns; }
  // Bytes from the start of a stream tensor's block to the rows, or to the column, where this warp's slice begins.
  __device__ __forceinline__ int row_offset() const { return slice * Spec::kWarpStreamRows * Spec::kRowBytes; }
  __device__ __forceinline__ int column_offset() const { return first_column() * 2; }
};

}  // namespace flashmoe::attention::backward::mma_sync
