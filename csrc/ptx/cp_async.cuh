// cp.async: 16 bytes from global to shared memory without a register in between (sm_80 and later).
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

// Reads source_bytes (0 or 16) bytes and fills the rest of the 16 with zeros. With 0 nothing is read and gmem may point
// past the end of its allocation, but it must be 16-byte aligned. Bypasses L1 (.cg): a tile is read once per block.
__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem, int source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem_address(smem)),
               "l"(__cvta_generic_to_global(gmem)), "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem_address(smem)),
               "l"(__cvta_generic_to_global(gmem))
               : "memory");
}

// Which lines of the L2 cache are evicted first, for a whole access. No policy is not the same as evict_normal.
struct CachePolicy {
  uint64_t bits;
};

__device__ __forceinline__ CachePolicy evict_normal() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

__device__ __forceinline__ CachePolicy evict_first() {
  CachePolicy policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy.bits));
  return policy;
}

__device__ __forceinline__ void cp_async_16(SmemPointer smem, const void* gmem, int source_bytes, CachePolicy policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(smem_address(smem)),
               "l"(__cvta_generic_to_global(gmem)), "r"(source_bytes), "l"(policy.bits)
               : "memory");
}

// Closes the group of all copies this thread started since the last call.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashmoe::ptx
