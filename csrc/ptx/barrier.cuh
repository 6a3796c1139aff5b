// Execution barriers inside a thread block; each also orders the shared-memory accesses of the threads it joins.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void barrier_sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }

// Waits until `threads` threads (a multiple of 32) have arrived at barrier `id` (1 to 15; 0 is the whole block's).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Counts this warp in at barrier `id` without waiting.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void warp_sync() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }

}  // namespace flashmoe::ptx
