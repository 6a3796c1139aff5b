// Emulated: the signatures of csrc/ptx/barrier.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void barrier_sync_block(Site site = Site::here()) {
  emulation::barrier(0, emulation::kWholeBlock, true, site, "barrier_sync_block");
}

__device__ __forceinline__ void named_barrier_sync(int id, int threads, Site site = Site::here()) {
  emulation::barrier(id, threads, true, site, "named_barrier_sync");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads, Site site = Site::here()) {
  emulation::barrier(id, threads, false, site, "named_barrier_arrive");
}

__device__ __forceinline__ void warp_sync(Site site = Site::here()) { emulation::warp_barrier(site, "warp_sync"); }

}  // namespace flashmoe::ptx
