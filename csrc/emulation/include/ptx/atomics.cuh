// Emulated: the signatures of csrc/ptx/atomics.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/memory.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ int32_t atomic_add_global(int32_t* gmem, int32_t value, Site site = Site::here()) {
  return emulation::atomic_add(gmem, value, site, "atomic_add_global");
}

// Blocks see each other's stores at once here.
__device__ __forceinline__ int32_t atomic_add_global_ordered(int32_t* gmem, int32_t value, Site site = Site::here()) {
  return emulation::atomic_add(gmem, value, site, "atomic_add_global_ordered");
}

__device__ __forceinline__ void atomic_add_shared(SmemPointer smem, int32_t value, Site site = Site::here()) {
  emulation::add_shared(smem.address, value, site, "atomic_add_shared");
}

}  // namespace flashmoe::ptx
