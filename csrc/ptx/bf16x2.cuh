// Arithmetic of pairs of 16-bit elements (from sm_80 on).
#pragma once

#include "ptx/elements.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

// The products of both halves, each rounded once; subnormals are kept.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));  // + (-0): a * b itself
  return product;
}

// The larger magnitude of each half, negative if exactly one of a and b is (sm_86 on); a number wins over a NaN.
template <typename Element>
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b);

#define FLASHMOE_DEFINE_LARGER(Element, type)                                              \
  template <>                                                                              \
  __device__ __forceinline__ uint32_t larger_magnitudes<Element>(uint32_t a, uint32_t b) { \
    uint32_t larger;                                                                       \
    asm("max.xorsign.abs." type "x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));         \
    return larger;                                                                         \
  }

FLASHMOE_DEFINE_LARGER(F16, "f16")
FLASHMOE_DEFINE_LARGER(BF16, "bf16")
FLASHMOE_DEFINE_LARGER(XF16, "xf16")

#undef FLASHMOE_DEFINE_LARGER

}  // namespace flashmoe::ptx
