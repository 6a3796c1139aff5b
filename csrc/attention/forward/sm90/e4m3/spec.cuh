// The compile-time values of a forward kernel on 8-bit floats (e4m3) and its shared-memory layout: those of a 16-bit
// kernel (../spec.cuh), with tiles of codes (e4m3 bytes). Two codes are one element of a tile, and of a tensor map.
//
// wgmma takes 8-bit operands only K-major. Q and K are; V is not, so a preceding kernel writes it transposed
// (transpose.cuh), in blocks of kBlockN keys. A block is a tile of kHeadDim rows here.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/forward/sm90/varlen/spec.cuh"
#include "device/math.cuh"
#include "device/shared_tile.cuh"

namespace flashmoe::attention::sm90 {

constexpr int kCodesOfRow = 128;  // a tile's row has 128 bytes; at head dim 64 the second half is zeros

// Base: the spec of a 16-bit kernel with one stage, dense or ragged (below).
// kBlockScales: 1 for calls in which blocks of rows have scales. Four warpgroups have no registers for them, and no
// ragged call has any.
template <typename Base, int kNumStages_, int kPartialColumns_, int kBlockScales = 0>
struct SpecOfCodes : Base {
  static constexpr int kNumStages = kNumStages_;
  static constexpr bool kHasCodes = true;
  static constexpr bool kIsTight = Base::kConsumerRegisters < 160;
  static constexpr bool kHasBlockScales = kBlockScales != 0;
  static_assert(!kHasBlockScales || !kIsTight, "112 registers leave none for block scales");
  static constexpr bool kKeepsLoops =
      !kHasBlockScales && !kIsTight && Base::kTileBytes == sizeof(Tile<MaskKind::kFull>);
  static constexpr int kHeadDim = Base::kHeadDim;
  static constexpr int kBlockN = Base::kBlockN;
  static_assert(kBlockN == kTransposedKeys,
                "P is rounded by the maximum of its block's end: one width for every kernel");

  static constexpr int kRowElements = (kHeadDim < kCodesOfRow ? kCodesOfRow : kHeadDim) / 2;
  using QueryTile = SharedTile<64, kRowElements>;
  using KeyTile = SharedTile<kBlockN, kRowElements>;
  using ValueTile = SharedTile<kHeadDim, kBlockN / 2>;

  // Columns of P V that the tensor cores accumulate for one block before they are added to the output in float32.
  static constexpr int kPartialColumns = kPartialColumns_;

  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + Base::kNumQueryTiles * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kNumStages * KeyTile::kBytes;
  static constexpr int kOutputOffset = kValueOffset + kNumStages * ValueTile::kBytes;
  static constexpr int kTileOffset = kOutputOffset + Base::kNumConsumers * Base::kOutputBytes;
  static constexpr int kSchedulerOffset = kTileOffset + Base::kNumQueryTiles * Base::kTileBytes;
  static constexpr int kBarrierOffset = kSchedulerOffset + (Base::kBarrierOffset - Base::kSchedulerOffset);
  static constexpr int kNumBarriers = Base::kNumBarriers + 4 * (kNumStages - Base::kNumStages);
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kNumOutputSlabs,
          int kPartialColumns, int kBlockScales>
struct E4m3Spec : SpecOfCodes<ForwardSpec<Element, kHeadDim, kBlockM, kBlockN, 1, kNumWarps, 1, kNumOutputSlabs>,
                              kNumStages, kPartialColumns, kBlockScales> {};

// Ragged batches: the scheduling warp finds the tiles, as in the 16-bit kernels.
template <typename Element, int kHeadDim, int kBlockM, int kBlockN, int kNumStages, int kNumWarps, int kNumOutputSlabs,
          int kPartialColumns, int kBlockScales>
struct E4m3VarlenSpec : SpecOfCodes<VarlenSpec<Element, kHeadDim, kBlockM, kBlockN, 1, kNumWarps, 1, kNumOutputSlabs>,
                                    kNumStages, kPartialColumns, kBlockScales> {};

}  // namespace flashmoe::attention::sm90
