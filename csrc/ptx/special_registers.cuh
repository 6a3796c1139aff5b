// Where this thread is. Every launch here is one-dimensional.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Volatile, so that what the end of a kernel derives from it is computed there, not kept in registers from the start.
__device__ __forceinline__ int block_index() {
  int index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int block_size() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int grid_size() { return static_cast<int>(gridDim.x); }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }

// x itself, hidden from the optimiser: values derived from it are computed where they are used, once per loop
// iteration, and hold no register in between.
__device__ __forceinline__ int recompute(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ uint32_t recompute(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ int64_t recompute(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

}  // namespace flashmoe::ptx
