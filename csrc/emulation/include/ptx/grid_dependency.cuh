// Emulated: the signatures of csrc/ptx/grid_dependency.cuh plus the call site; a test holds the two against each other.
// One launch runs at a time here. The machine knows which buffers the grid in front writes, and that a thread has waited.
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
