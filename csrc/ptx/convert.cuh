// Conversions between fp32 and the 16-bit element types, two at a time.
#pragma once

#include "ptx/elements.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

// Rounds to nearest even; `low` lands in bits 0 to 15, the lower address.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

// The inverse: x comes from bits 0 to 15.
template <typename Element>
__device__ __forceinline__ float2 unpack(uint32_t pair);

struct alignas(4) Halves {
  uint16_t low, high;
};

#if __CUDA_ARCH__ >= 800
#define FLASHMOE_PACK(type) asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low))
#else
#define FLASHMOE_PACK(type)                                                       \
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn." type ".f32 low, %1;\n\tcvt.rn." type \
      ".f32 high, %2;\n\tmov.b32 %0, {low, high};\n\t}"                           \
      : "=r"(pair)                                                                \
      : "f"(low), "f"(high))
#endif

// cvt.f32.bf16 is an instruction from 9.0 on; for older targets the build writes another
// (flashmoe_build/compile/elements.py).
#define FLASHMOE_DEFINE_CONVERSIONS(Element, type)                           \
  template <>                                                                \
  __device__ __forceinline__ uint32_t pack<Element>(float low, float high) { \
    uint32_t pair;                                                           \
    FLASHMOE_PACK(type);                                                     \
    return pair;                                                             \
  }                                                                          \
                                                                             \
  template <>                                                                \
  __device__ __forceinline__ float2 unpack<Element>(uint32_t pair) {         \
    const Halves& halves = reinterpret_cast<const Halves&>(pair);            \
    float2 x;                                                                \
    asm("cvt.f32." type " %0, %1;" : "=f"(x.x) : "h"(halves.low));           \
    asm("cvt.f32." type " %0, %1;" : "=f"(x.y) : "h"(halves.high));          \
    return x;                                                                \
  }

FLASHMOE_DEFINE_CONVERSIONS(F16, "f16")
FLASHMOE_DEFINE_CONVERSIONS(BF16, "bf16")
FLASHMOE_DEFINE_CONVERSIONS(XF16, "xf16")

#undef FLASHMOE_DEFINE_CONVERSIONS
#undef FLASHMOE_PACK

}  // namespace flashmoe::ptx
