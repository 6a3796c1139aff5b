// Emulated: the signatures of csrc/ptx/special_registers.cuh; none needs a call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ int thread_index() { return emulation::thread_index(); }
__device__ __forceinline__ int block_index() { return emulation::block_index(); }
__device__ __forceinline__ int block_size() { return emulation::block_size(); }
__device__ __forceinline__ int grid_size() { return emulation::grid_size(); }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }

__device__ __forceinline__ int recompute(int x) { return x; }
__device__ __forceinline__ uint32_t recompute(uint32_t x) { return x; }
__device__ __forceinline__ int64_t recompute(int64_t x) { return x; }

}  // namespace flashmoe::ptx
