// Loads of data that nothing reads again.
#pragma once

#include "ptx/cp_async.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void ld_global_128(uint32_t (&value)[4], const void* gmem, CachePolicy policy) {
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value[0]), "=r"(value[1]), "=r"(value[2]), "=r"(value[3])
               : "l"(__cvta_generic_to_global(gmem)), "l"(policy.bits)
               : "memory");
}

}  // namespace flashmoe::ptx
