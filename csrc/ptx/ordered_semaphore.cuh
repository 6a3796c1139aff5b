// Turns of thread blocks, counted in global memory: who waits for a count sees what those did who raised it.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

// Waits until *gmem is `value`; what was done before the store that made it so is seen by what follows, copies of the copy engine
// included.
__device__ __forceinline__ void semaphore_wait(const int32_t* gmem, int32_t value) {
  int32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  } while (found != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Sets *gmem after what this thread has done, and after its bulk stores that tma_store_wait says are complete.
__device__ __forceinline__ void semaphore_release(int32_t* gmem, int32_t value) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "r"(value) : "memory");
}

}  // namespace ptx
}  // namespace flashmoe
