// Memory fences: between the ordinary ("generic") accesses of threads and the asynchronous units (sm_90), and between blocks.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

// This thread's earlier stores to shared memory become visible to the copy engine and to wgmma. Each writing thread
// executes it, then a barrier joins them with the thread that issues the asynchronous access.
__device__ __forceinline__ void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Orders what this thread, and those that a barrier joined it with, wrote or read before against what follows, for the whole GPU:
// one thread of a block before it tells another block that results are there, and after it was told.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

}  // namespace ptx
}  // namespace flashmoe
