// Emulated: the signatures of csrc/ptx/grid_dependency.cuh plus the call site; a test holds the two against each other.
// Launches follow one another here, each after the whole of the one before: there is nothing to wait for.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

using emulation::Site;

__device__ __forceinline__ void grid_launch_dependents(Site site = Site::here()) {
  static_cast<void>(site);
}

__device__ __forceinline__ void grid_dependency_wait(Site site = Site::here()) {
  static_cast<void>(site);
}

}  // namespace ptx
}  // namespace flashmoe
