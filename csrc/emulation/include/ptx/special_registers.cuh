// Emulated: the signatures of csrc/ptx/special_registers.cuh plus the call site; a test holds the two against each other.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

using emulation::Site;

__device__ __forceinline__ int thread_index() { return emulation::thread_index(); }
__device__ __forceinline__ int block_index() { return emulation::block_index(); }
__device__ __forceinline__ int block_size() { return emulation::block_size(); }
__device__ __forceinline__ int grid_size() { return emulation::grid_size(); }
__device__ __forceinline__ int lane_index() { return thread_index() % 32; }
__device__ __forceinline__ int warp_index() { return thread_index() / 32; }

}  // namespace ptx
}  // namespace flashmoe
