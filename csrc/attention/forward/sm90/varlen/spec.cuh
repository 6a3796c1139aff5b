// The compile-time values of a kernel for ragged and paged attention: those of a dense one, with longer tile records
// and room for what the scheduling warp and the loading thread exchange.
#pragma once

#include "attention/forward/sm90/spec.cuh"

namespace flashmoe::attention::sm90 {

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kNumQueryStages_, int kNumOutputSlabs_, int kScores_ = 0, int kFewerValueColumns_ = 0>
struct VarlenSpec : ForwardSpec<Element_, kHeadDim_, kBlockM_, kBlockN_, kNumStages_, kNumWarps_, kNumQueryStages_,
                                kNumOutputSlabs_, 0, kFewerValueColumns_, 32, 2 * 48, 5> {
  // true: scores pass through a softcap or a mask tensor; otherwise the kernel has neither the code nor the registers
  // for them.
  static constexpr bool kHasScoreMod = kScores_ == 1;
  static constexpr bool kHasAlibi = kScores_ == 2;  // ALiBi, and a softcap before it
  static constexpr int kNextTileBytes = 48;
  // Registers per thread, as in ForwardSpec. Two or three consumer warpgroups leave the scheduling warp enough
  // registers.
  static constexpr int kConsumers = kBlockM_ / 64;
  // A block with one consumer warpgroup shares a multiprocessor with two others at D=64 (80 registers per thread),
  // otherwise with one.
  static constexpr bool kIsThird = kConsumers == 1 && kHeadDim_ == 64;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 32 : kIsThird ? 48 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 4   ? 112
                                            : kConsumers == 3 ? 152
                                            : kConsumers == 2 ? 224
                                            : kIsThird        ? 112
                                                              : 200;
};

// Takes DropoutForwardParams. kScores 2: ALiBi, and a softcap before it; otherwise neither softcap nor mask tensor.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kNumQueryStages,
          int kNumOutputSlabs, int kScores>
struct DropoutForwardSpec : VarlenSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kNumQueryStages,
                                       kNumOutputSlabs, kScores> {
  static constexpr bool kHasDropout = true;
  static_assert(kScores != 1, "softcaps and mask tensors run on the sm80 kernels");
};

// Streams an additive mask that has an element for each dense row and key; without a softcap.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kNumQueryStages,
          int kNumOutputSlabs>
struct MaskForwardSpec
    : VarlenSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kNumQueryStages, kNumOutputSlabs> {
  using Base = VarlenSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kNumQueryStages, kNumOutputSlabs>;
  static constexpr bool kStreamsMask = true;
  using MaskTile = SharedTile<64, kBlockN>;  // of one warpgroup
  static_assert(kBlockN % 64 == 0, "boxes of 64 columns");
  static constexpr int kMaskOffset = Base::kTileOffset;
  static constexpr int kTileOffset = kMaskOffset + kNumStages * Base::kNumConsumers * MaskTile::kBytes;
  static constexpr int kSchedulerOffset = kTileOffset + (Base::kSchedulerOffset - Base::kTileOffset);
  static constexpr int kBarrierOffset = kTileOffset + (Base::kBarrierOffset - Base::kTileOffset);
  static constexpr int kSharedBytes = kBarrierOffset + Base::kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

// Chunks: few rows over many keys. The heads of a group are rows of a tile, and the params.num_splits splits of a
// tile's keys are separate work items (folded.cuh).
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kNumQueryStages,
          int kNumOutputSlabs, int kScores>
struct ChunkSpec : VarlenSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps, kNumQueryStages,
                              kNumOutputSlabs, kScores> {
  static constexpr bool kIsFolded = true;
  // The scheduling warp also finds the splits, and two consumer warpgroups do not need all of the remaining registers.
  static_assert(kBlockM == 128, "register counts assume two consumer warpgroups");
  static constexpr int kProducerRegisters = 72;  // 72 + 2 * 216 = 3 * 168, the registers that the block starts with
  static constexpr int kConsumerRegisters = 216;
};

// Chunks over a cache of 8-bit floats: one more warpgroup converts K and V from codes to elements (converter.cuh).
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps_, int kNumQueryStages,
          int kNumOutputSlabs, int kScores>
struct CodedChunkSpec : ChunkSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps_ - 4, kNumQueryStages,
                                  kNumOutputSlabs, kScores> {
  using Base = ChunkSpec<Element, kHeadDim, kBlockM, kBlockN, kNumStages, kNumWarps_ - 4, kNumQueryStages,
                         kNumOutputSlabs, kScores>;
  static constexpr bool kConvertsCodes = true;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = kNumWarps * 32;
  // 72 + 2 * 192 + 56 = 4 * 128; consumers with 128 output accumulators per thread need more than 192.
  static constexpr int kProducerRegisters = kHeadDim == 256 ? 56 : 72;
  static constexpr int kConverterRegisters = 56;
  static constexpr int kConsumerRegisters = kHeadDim == 256 ? 200 : 192;

  // K and V: slabs of 128 bytes per row; two codes are one element of the tensor map. At head dim 64 the second half is
  // zeros.
  static constexpr int kCodeSlabs = (kHeadDim + 127) / 128;
  using CodeTile = SharedTile<kBlockN, kCodeSlabs * kSlabColumns>;
  static constexpr int kCodeSlots = 2;
  static constexpr int kCodeOffset = Base::kTileOffset;
  static constexpr int kTileOffset = kCodeOffset + kCodeSlots * CodeTile::kBytes;
  static constexpr int kSchedulerOffset = kTileOffset + (Base::kSchedulerOffset - Base::kTileOffset);
  static constexpr int kCodeBlockOffset = kTileOffset + (Base::kBarrierOffset - Base::kTileOffset);
  static constexpr int kBarrierOffset = kCodeBlockOffset + kCodeSlots * 16;
  static constexpr int kNumBarriers = Base::kNumBarriers + 2 * kCodeSlots;
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kBlockN * kCodeSlabs == 128, "a thread of the warpgroup converts a row of a slab");
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

}  // namespace flashmoe::attention::sm90
