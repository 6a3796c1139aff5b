// Where this thread is. Every launch here is one-dimensional.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int block_index() { return static_cast<int>(blockIdx.x); }
__device__ __forceinline__ int block_size() { return static_cast<int>(blockDim.x); }
__device__ __forceinline__ int grid_size() { return static_cast<int>(gridDim.x); }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }

}  // namespace ptx
}  // namespace flashmoe
