// Compile-time description of a decoding kernel: few query rows, many keys.
#pragma once

#include "device/swizzle.cuh"
#include "ptx/mma.cuh"
#include "ptx/types.cuh"

namespace flashmoe::attention::decode {

constexpr int kWarpKeys = 16;  // keys of a key tile per warp

// The shared-memory layout of a warp's tile of 16 rows, and what a lane copies: 16 bytes of row lane / kLanes and of
// every kRowsPerPass-th row after it, in each segment of up to 128 bytes.
template <typename Element_, int kColumns>
struct RowTile {
  using Element = Element_;
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(Element));
  static constexpr int kLanes = kRowBytes < 128 ? kRowBytes / kChunkBytes : kSegmentChunks;
  static constexpr int kSegments = kRowBytes / (kLanes * kChunkBytes);
  static constexpr int kSegmentColumns = kColumns / kSegments;
  static constexpr int kLaneColumns = kSegmentColumns / kLanes;
  static constexpr int kRowsPerPass = 32 / kLanes;
  static constexpr int kPasses = kWarpKeys / kRowsPerPass;

  // Byte offset of a 16-byte chunk. The chunks of eight rows in one column are in different banks; two rows of 64 bytes
  // share 128 bytes.
  __device__ __forceinline__ static constexpr int offset(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row / (kSegmentChunks / kLanes) % kLanes)) * kChunkBytes;
  }
};

// One block computes up to 16 query rows of one key head. A key tile has kBlockN keys, 16 for each warp. A warp loads
// and multiplies only its own keys, so that nothing in the loop over tiles waits for another warp.
//
// kNumStages          key tiles of a warp's ring, K and V; kNumStages - 1 of them are in flight.
// kQueryInRegisters   1: a warp keeps Q in registers; 0, to save registers: it reads a copy in shared memory per tile.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kQueryInRegisters_, int kAlibi_>
struct DecodeSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kTileKeys = kBlockN_;
  static constexpr int kNumStages = kNumStages_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr bool kHasAlibi = kAlibi_ != 0;  // ALiBi instead of mask tensors
  static constexpr bool kHasValues = true;         // values are loaded with the keys

  // Required by the products of a warp (mma_sync/).
  static constexpr bool kQueryInRegisters = kQueryInRegisters_ != 0;
  // Keys that many sequences share come from the L2 cache so fast that a warp's instructions matter: they have their
  // own loop. Beyond D=64 the kernel would get so long that few sequences take 1 us to 2 us more.
  static constexpr bool kHasTwoLoops = kHeadDim <= 64;
  static constexpr int kBlockN = kWarpKeys;
  static constexpr int kMmaM = 1;
  static constexpr int kMmaN = kBlockN / 8;
  static constexpr int kMmaD = kHeadDim / 8;

  using KeyTile = RowTile<Element, kHeadDim>;
  static constexpr int kRowBytes = KeyTile::kRowBytes;
  static constexpr int kTileBytes = kWarpKeys * kRowBytes;  // of K, of V, or of Q
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRingBytes = kNumStages * kStageBytes;             // of one warp
  static constexpr int kStateBytes = kBlockM * 8;                         // of one warp: the row states it ends with
  static constexpr int kQueryBytes = kQueryInRegisters ? 0 : kTileBytes;  // of one warp
  static constexpr int kQueryOffset = kNumWarps * kRingBytes;
  static constexpr int kArrivalBytes = 16;
  static constexpr int kSharedBytes = kNumWarps * (kRingBytes + kQueryBytes + kStateBytes) + kArrivalBytes;

  // The first of the two columns of a 16x8 block of the output that a lane of a quad holds.
  static __device__ __forceinline__ int output_column(int block, int lane) { return block * 8 + lane * 2; }
  // A warp's output in fp32 overwrites its ring. Each row starts 32 bytes further on in the banks, so that four quads
  // store at once.
  static constexpr int kOutputRowBytes = kHeadDim * 4 + 32;

  static __device__ __forceinline__ void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ptx::mma_m16n8k16<Element>(d, a, b0, b1);
  }

  static_assert(sizeof(Element) == 2, "mma.m16n8k16 and ldmatrix here take 16-bit elements");
  static_assert(kHeadDim % 64 == 0, "the swizzle permutes within 64 columns");
  static_assert(kBlockM == 16, "the rows of one m16n8k16 product");
  static_assert(kTileKeys == kWarpKeys * kNumWarps, "each warp has 16 keys of a tile");
  static_assert(kNumStages >= 2, "a tile is multiplied while another one loads");
  static_assert(kBlockM * kOutputRowBytes <= kRingBytes, "a warp leaves its output in its ring");
  static_assert(kNumThreads % (kHeadDim / 4) == 0, "a thread adds up four columns of a row");
};

}  // namespace flashmoe::attention::decode
