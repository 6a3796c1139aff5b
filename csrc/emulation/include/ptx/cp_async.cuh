// Emulated: the signatures of csrc/ptx/cp_async.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem, int source_bytes,
                                            Site site = Site::here()) {
  emulation::copy_async(smem.address, gmem, 16, source_bytes, site, "cp_async_16");
}

__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem, Site site = Site::here()) {
  emulation::copy_async(smem.address, gmem, 16, 16, site, "cp_async_16");
}

// Caching is not emulated.
struct CachePolicy {
  uint64_t bits;
};

__device__ __forceinline__ CachePolicy evict_normal() { return CachePolicy{0}; }

__device__ __forceinline__ CachePolicy evict_first() { return CachePolicy{1}; }

__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem, int source_bytes, CachePolicy policy,
                                            Site site = Site::here()) {
  (void)policy;
  cp_async_16(smem, gmem, source_bytes, site);
}

__device__ __forceinline__ void cp_async_commit(Site site = Site::here()) {
  emulation::copy_async_commit(site, "cp_async_commit");
}

template <int kPending>
__device__ __forceinline__ void cp_async_wait(Site site = Site::here()) {
  emulation::copy_async_wait(kPending, site, "cp_async_wait");
}

}  // namespace flashmoe::ptx
