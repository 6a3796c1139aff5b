// Emulated: the signatures of csrc/ptx/turns.cuh plus the call site; a test holds the two against each other.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

using emulation::Site;

__device__ __forceinline__ void wait_for_turn(const int32_t* gmem, int32_t value, Site site = Site::here()) {
  emulation::wait_for_turn(gmem, value, site, "wait_for_turn");
}

__device__ __forceinline__ void pass_turn(int32_t* gmem, int32_t value, Site site = Site::here()) {
  emulation::pass_turn(gmem, value, site, "pass_turn");
}

}  // namespace ptx
}  // namespace flashmoe
