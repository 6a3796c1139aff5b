// Memory fences between the ordinary ("generic") accesses of threads and the asynchronous units (sm_90).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// This thread's earlier stores to shared memory become visible to TMA and to wgmma. Each writing thread executes it,
// then a barrier joins them with the thread that issues the asynchronous access.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace flashmoe::ptx
