// The compile-time values of a kernel for ragged, paged and banded attention: those of a dense one, with longer tile records and one
// barrier more.
#pragma once

#include "attention/forward/sm90/spec.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_,
          int kNumQueryStages_, int kNumOutputSlabs_>
struct VarlenSpec : ForwardSpec<Element_, kHeadDim_, kBlockM_, kBlockN_, kNumStages_, kNumWarps_, kNumQueryStages_,
                                kNumOutputSlabs_, 0, 32, 1> {
  // The producing warp holds the places of entries and pages, and takes from the consumers what that needs.
  static constexpr int kConsumers = kBlockM_ / 64;
  static constexpr int kProducerRegisters = kConsumers == 4 ? 64 : kConsumers == 3 ? 80 : 56;
  static constexpr int kConsumerRegisters = kConsumers == 4 ? 104 : kConsumers == 3 ? 144 : 224;
  static_assert(kBlockN_ / 8 <= 32, "a lane of the producing warp knows the page of one box of a block");
};

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
