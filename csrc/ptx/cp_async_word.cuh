// cp.async of single words, for numbers that travel with a tile (sm_80 and later). Waited for with it: cp_async.cuh.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void cp_async_4(SmemPointer smem, const void* gmem) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(smem)), "l"(__cvta_generic_to_global(gmem))
               : "memory");
}

}  // namespace flashmoe::ptx
