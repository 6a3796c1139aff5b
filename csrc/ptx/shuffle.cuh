// Exchange inside a full warp: all 32 lanes take part in every call.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

// The value of the lane whose index differs from this lane's in the bits of lane_mask.
__device__ __forceinline__ float shuffle_xor(float value, int lane_mask) {
  float result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(lane_mask));
  return result;
}

__device__ __forceinline__ uint32_t shuffle_xor(uint32_t value, int lane_mask) {
  uint32_t result;
  asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane_mask));
  return result;
}

__device__ __forceinline__ float shuffle_index(float value, int lane) {
  float result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=f"(result) : "f"(value), "r"(lane));
  return result;
}

__device__ __forceinline__ int shuffle_index(int value, int lane) {
  int result;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 0x1f, 0xffffffff;" : "=r"(result) : "r"(value), "r"(lane));
  return result;
}

__device__ __forceinline__ uint64_t shuffle_index(uint64_t value, int lane) {
  const auto low = static_cast<uint32_t>(shuffle_index(static_cast<int>(value), lane));
  const auto high = static_cast<uint32_t>(shuffle_index(static_cast<int>(value >> 32), lane));
  return static_cast<uint64_t>(high) << 32 | low;
}

__device__ __forceinline__ bool vote_any(bool predicate) { return __any_sync(0xffffffffu, predicate) != 0; }

__device__ __forceinline__ bool vote_all(bool predicate) { return __all_sync(0xffffffffu, predicate) != 0; }

// A mask of the lanes in which it is true.
__device__ __forceinline__ uint32_t vote_ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }

#if __CUDA_ARCH__ >= 800
// The largest value of the warp.
__device__ __forceinline__ uint32_t reduce_max(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

// The sum over the warp.
__device__ __forceinline__ int32_t reduce_add(int32_t value) { return __reduce_add_sync(0xffffffffu, value); }
#endif

#if __CUDA_ARCH__ >= 900
// True in exactly one lane of the (converged) warp.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n\t"
      ".reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.b32 %0, 1, 0, p;\n\t"
      "}"
      : "=r"(elected));
  return elected != 0;
}
#endif

}  // namespace flashmoe::ptx
