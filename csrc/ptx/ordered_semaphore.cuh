// A counter in global memory by which thread blocks act in a fixed order: a block that waits for a count sees
// everything done before the count was reached.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Waits until *gmem is `value`. Everything done before that value was stored is then visible, to TMA copies too.
__device__ __forceinline__ void semaphore_wait(const int32_t* gmem, int32_t value) {
  int32_t found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(__cvta_generic_to_global(gmem)) : "memory");
  } while (found != value);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Sets *gmem after everything that this thread has done, including its bulk stores that tma_store_wait has waited for.
__device__ __forceinline__ void semaphore_release(int32_t* gmem, int32_t value) {
  asm volatile("fence.proxy.async.global;" ::: "memory");
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "r"(value) : "memory");
}

}  // namespace flashmoe::ptx
