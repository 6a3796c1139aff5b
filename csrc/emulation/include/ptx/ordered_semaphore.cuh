// Emulated: the signatures of csrc/ptx/ordered_semaphore.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void semaphore_wait(const int32_t* gmem, int32_t value, Site site = Site::here()) {
  emulation::semaphore_wait(gmem, value, site, "semaphore_wait");
}

__device__ __forceinline__ void semaphore_release(int32_t* gmem, int32_t value, Site site = Site::here()) {
  emulation::semaphore_release(gmem, value, site, "semaphore_release");
}

}  // namespace flashmoe::ptx
