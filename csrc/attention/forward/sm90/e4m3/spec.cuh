// The compile-time values of a forward kernel of 8-bit floats (e4m3), and its shared-memory map: a 16-bit kernel's (../spec.cuh) with tiles of
// codes. Two codes are one element of a tile, as for the copy engine.
//
// wgmma takes 8-bit operands K-major alone. Q and K lie so; V does not, and a kernel in front of this one writes it transposed
// (transpose.cuh), a block of kBlockN keys after the other, which is a tile of kHeadDim rows here.
#pragma once

#include "attention/forward/sm90/spec.cuh"
#include "device/math.cuh"
#include "device/shared_tile.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

constexpr int kCodesOfRow = 128;      // a tile's row of 128 bytes; of head dim 64 the second half is zeros
constexpr int kTransposedKeys = 128;  // of a block of transposed V: kBlockN of every kernel that reads it

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kNumOutputSlabs_, int kPartialColumns_>
struct E4m3Spec : ForwardSpec<Element_, kHeadDim_, kBlockM_, kBlockN_, 1, kNumWarps_, 1, kNumOutputSlabs_> {
  using Base = ForwardSpec<Element_, kHeadDim_, kBlockM_, kBlockN_, 1, kNumWarps_, 1, kNumOutputSlabs_>;
  static constexpr int kNumStages = kNumStages_;
  static constexpr bool kIsTight = Base::kConsumerRegisters < 160;
  // Scales of blocks of keys, which have loops of their own: four warpgroups have no registers for these.
  static constexpr bool kHasBlockScales = !kIsTight;
  static_assert(kBlockN_ == kTransposedKeys,
                "P is rounded by the maximum of its block's end: one width for every kernel");

  static constexpr int kRowElements = (kHeadDim_ < kCodesOfRow ? kCodesOfRow : kHeadDim_) / 2;
  using QueryTile = SharedTile<64, kRowElements>;
  using KeyTile = SharedTile<kBlockN_, kRowElements>;
  using ValueTile = SharedTile<kHeadDim_, kBlockN_ / 2>;

  // Sums of P V that the tensor cores make before they join the output in float32: of a block, and of so many columns.
  static constexpr int kPartialColumns = kPartialColumns_;

  static constexpr int kQueryOffset = 0;
  static constexpr int kKeyOffset = kQueryOffset + Base::kNumQueryTiles * QueryTile::kBytes;
  static constexpr int kValueOffset = kKeyOffset + kNumStages * KeyTile::kBytes;
  static constexpr int kOutputOffset = kValueOffset + kNumStages * ValueTile::kBytes;
  static constexpr int kTileOffset = kOutputOffset + Base::kNumConsumers * Base::kOutputBytes;
  static constexpr int kBarrierOffset = kTileOffset + Base::kNumQueryTiles * Base::kTileBytes;
  static constexpr int kNumBarriers = 2 * Base::kNumQueryTiles + 4 * kNumStages;
  static constexpr int kSharedBytes = kBarrierOffset + kNumBarriers * 8;
  static_assert(kSharedBytes <= 232448, "sm_90 gives a block at most 227 KiB");
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
