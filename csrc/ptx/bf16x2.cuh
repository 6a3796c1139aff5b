// Arithmetic of pairs of bf16 (from sm_80 on).
#pragma once

#include "ptx/types.cuh"

namespace flashmoe {
namespace ptx {

// Both halves' products, each rounded once; subnormals stay.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + (-0): a * b itself
  return product;
}

}  // namespace ptx
}  // namespace flashmoe
