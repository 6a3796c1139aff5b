// Emulated: the signatures of csrc/ptx/grid_dependency.cuh plus the call site; a test compares the two.
// One launch runs at a time here. The machine knows what the preceding grid writes, and whether a thread has waited.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void grid_launch_dependents(Site site = Site::here()) { static_cast<void>(site); }

__device__ __forceinline__ void grid_dependency_wait(Site site = Site::here()) {
  static_cast<void>(site);
  emulation::grid_dependency_wait();
}

}  // namespace flashmoe::ptx
