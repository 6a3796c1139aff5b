// Sums and maxima over the lanes of a quad (four lanes: one row of an mma or wgmma accumulator) and of a warp.
#pragma once

#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {

__device__ __forceinline__ float quad_max(float value) {
  value = ptx::max_ftz(value, ptx::shuffle_xor(value, 1));
  return ptx::max_ftz(value, ptx::shuffle_xor(value, 2));
}

__device__ __forceinline__ float quad_sum(float value) {
  value += ptx::shuffle_xor(value, 1);
  return value + ptx::shuffle_xor(value, 2);
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value = ptx::max_ftz(value, ptx::shuffle_xor(value, lanes));
  return value;
}

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) value += ptx::shuffle_xor(value, lanes);
  return value;
}

// Inclusive prefix sum over the lanes.
__device__ __forceinline__ int warp_prefix_sum(int value) {
  const int lane = ptx::lane_index();
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int below = ptx::shuffle_index(value, lane >= distance ? lane - distance : 0);
    if (lane >= distance) value += below;
  }
  return value;
}

// One instruction from sm_80 on.
__device__ __forceinline__ uint32_t warp_max(uint32_t value) {
#if __CUDA_ARCH__ >= 800
  return ptx::reduce_max(value);
#else
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    const uint32_t other = ptx::shuffle_xor(value, lanes);
    value = other > value ? other : value;
  }
  return value;
#endif
}

__device__ __forceinline__ uint32_t warp_min(uint32_t value) { return ~warp_max(~value); }

}  // namespace flashmoe
