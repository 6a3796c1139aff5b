// Emulated: the signatures of csrc/ptx/mbarrier.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

using Mbarrier = uint64_t;

__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int arrivals, Site site = Site::here()) {
  emulation::mbarrier_init(smem_address(barrier, site), arrivals, site, "mbarrier_init");
}

__device__ __forceinline__ void mbarrier_init_fence(Site site = Site::here()) {
  emulation::mbarrier_init_fence(site, "mbarrier_init_fence");
}

__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier, Site site = Site::here()) {
  emulation::mbarrier_arrive(smem_address(barrier, site), 0, site, "mbarrier_arrive");
}

__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, int bytes, Site site = Site::here()) {
  emulation::mbarrier_arrive(smem_address(barrier, site), bytes, site, "mbarrier_arrive_expect_tx");
}

__device__ __forceinline__ void mbarrier_arrive_cp_async(Mbarrier* barrier, Site site = Site::here()) {
  emulation::mbarrier_arrive_copies(smem_address(barrier, site), site, "mbarrier_arrive_cp_async");
}

__device__ __forceinline__ bool mbarrier_try_wait(Mbarrier* barrier, int phase_parity, Site site = Site::here()) {
  return emulation::mbarrier_try_wait(smem_address(barrier, site), phase_parity, site, "mbarrier_try_wait");
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, int phase_parity, Site site = Site::here()) {
  while (!emulation::mbarrier_try_wait(smem_address(barrier, site), phase_parity, site, "mbarrier_wait")) {
  }
}

}  // namespace flashmoe::ptx
