// Atomics.
#pragma once

#include "ptx/memory.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Adds and returns the value before; relaxed, device scope: it orders nothing else.
__device__ __forceinline__ int32_t atomic_add_global(int32_t* gmem, int32_t value) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(gmem)), "r"(value)
               : "memory");
  return before;
}

// The same with acquire and release: a thread that reads this count sees what this thread, and those joined with it by
// a barrier, did before; and what follows here sees what others did before they counted.
__device__ __forceinline__ int32_t atomic_add_global_ordered(int32_t* gmem, int32_t value) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(gmem)), "r"(value)
               : "memory");
  return before;
}

// Adds to a word of shared memory; orders nothing else.
__device__ __forceinline__ void atomic_add_shared(SmemPointer smem, int32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.add.s32 [%0], %1;" ::"r"(smem.address), "r"(value) : "memory");
}

}  // namespace flashmoe::ptx
