// The inclusive prefix sum over a warp's lanes.
#pragma once

#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

__device__ __forceinline__ int warp_inclusive_sum(int value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = ptx::shuffle_index(value, ptx::lane_index() - distance);
    if (ptx::lane_index() >= distance) value += other;
  }
  return value;
}

}  // namespace flashmoe::moe
