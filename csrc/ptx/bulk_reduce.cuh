// Stores float32 words from shared to global memory by TMA (sm_90), or adds them to what is there.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

// Starts gmem[i] = smem[i]; otherwise like bulk_reduce_add.
__device__ __forceinline__ void bulk_store(float* gmem, const void* smem, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(reinterpret_cast<uint64_t>(gmem)),
               "r"(smem_address(smem)), "r"(bytes)
               : "memory");
}

// Starts gmem[i] += smem[i] for `bytes` (a multiple of 16) at 16-byte aligned addresses, each word atomically, in no
// order. A bulk store of this thread: tma_store_commit, tma_store_wait_read and tma_store_wait count it. Ordinary
// stores to `smem` need fence_proxy_async_shared() before it.
__device__ __forceinline__ void bulk_reduce_add(float* gmem, const void* smem, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                   reinterpret_cast<uint64_t>(gmem)),
               "r"(smem_address(smem)), "r"(bytes)
               : "memory");
}

}  // namespace flashmoe::ptx
