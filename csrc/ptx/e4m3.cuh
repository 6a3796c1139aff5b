// 8-bit floats with 4 bits of exponent and 3 of fraction (e4m3fn: no infinity, largest 448, NaN 0x7f and 0xff):
// conversion and products (sm_90a; mma from sm_89 on). wgmma.cuh describes the registers of the 64xN accumulator, and
// what must surround the products.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/permute.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::ptx {

// Rounds to nearest even, saturates at 448; NaN stays NaN. `low` lands in bits 0 to 7, the lower address.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}
#else
__device__ __forceinline__ uint32_t round_to_e4m3(float value) {
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu, sign = bits >> 24 & 0x80u;
  if (magnitude > 0x7f800000u) return 0x7f;
  if (magnitude >= 0x43e00000u) return sign | 0x7e;
  if (magnitude < 0x3c800000u) {  // below 2^-6, in units of 2^-9: the float's own rounding to an integer
    constexpr float kInteger = 12582912.0f;
    return sign | (__float_as_uint(__uint_as_float(magnitude) * 512.0f + kInteger) - __float_as_uint(kInteger));
  }
  return sign | (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - 0x3c000000u) >> 20;
}
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  return round_to_e4m3(low) | round_to_e4m3(high) << 8;
}
#endif

// Stores only the code in bits 0 to 7.
__device__ __forceinline__ void st_global_e4m3(void* gmem, uint32_t code) {
  asm volatile("st.global.b8 [%0], %1;" ::"l"(__cvta_generic_to_global(gmem)), "r"(code) : "memory");
}

// One value in memory.
struct E4M3 {
  unsigned char bits;
};

// Four values as two pairs of 16-bit elements; exact, and NaN stays NaN. unpack_e4m3: bytes 0 and 1, then 2 and 3.
// unpack_alternate_e4m3: bytes 0 and 2, then 1 and 3, which takes fewer instructions below compute capability 8.9. For
// what the build writes for bf16, and for `unpack`, which is no instruction, see flashmoe_build/compile/elements.py.
template <typename Element>
__device__ __forceinline__ void unpack_e4m3(uint32_t (&pairs)[2], uint32_t codes);

template <typename Element>
__device__ __forceinline__ void unpack_alternate_e4m3(uint32_t (&pairs)[2], uint32_t codes);

#if __CUDA_ARCH__ >= 890
#define FLASHMOE_NATIVE unpack_e4m3
#define FLASHMOE_DERIVED unpack_alternate_e4m3
#define FLASHMOE_UNPACK_E4M3(type)                                                                             \
  "{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %2;\n\tcvt.rn." type "x2.e4m3x2 %0, low;\n\tcvt.rn." type \
  "x2.e4m3x2 %1, high;\n\t}"
#else
#define FLASHMOE_NATIVE unpack_alternate_e4m3
#define FLASHMOE_DERIVED unpack_e4m3
#define FLASHMOE_UNPACK_E4M3(type) "unpack." type "x2.e4m3x4 %0, %1, %2;"
#endif

#define FLASHMOE_DEFINE_UNPACK(Element, type)                                                       \
  template <>                                                                                       \
  __device__ __forceinline__ void FLASHMOE_NATIVE<Element>(uint32_t (&pairs)[2], uint32_t codes) {  \
    asm(FLASHMOE_UNPACK_E4M3(type) : "=r"(pairs[0]), "=r"(pairs[1]) : "r"(codes));                  \
  }                                                                                                 \
                                                                                                    \
  template <>                                                                                       \
  __device__ __forceinline__ void FLASHMOE_DERIVED<Element>(uint32_t (&pairs)[2], uint32_t codes) { \
    FLASHMOE_NATIVE<Element>(pairs, permute_bytes(codes, 0, 0x3120));                               \
  }

FLASHMOE_DEFINE_UNPACK(F16, "f16")
FLASHMOE_DEFINE_UNPACK(BF16, "bf16")
FLASHMOE_DEFINE_UNPACK(XF16, "xf16")

#undef FLASHMOE_DEFINE_UNPACK
#undef FLASHMOE_UNPACK_E4M3
#undef FLASHMOE_DERIVED
#undef FLASHMOE_NATIVE

// The same as floats.
__device__ __forceinline__ void widen_e4m3(float (&values)[4], uint32_t codes) {
  uint32_t pairs[2];
  unpack_e4m3<F16>(pairs, codes);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 pair = unpack<F16>(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

// d += a * b, 16x32 by 32x8. Registers as in mma.cuh's m16n8k16, each with four values instead of two.
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = a * b (scale_d == 0) or d += a * b (scale_d == 1): A 64 rows, B 128 rows of 32 k each in shared memory, 128-byte swizzle.
__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int scale_d) {
#define FLASHMOE_EIGHT(t)                                                                                     \
  "+f"(d[t]), "+f"(d[t + 1]), "+f"(d[t + 2]), "+f"(d[t + 3]), "+f"(d[t + 4]), "+f"(d[t + 5]), "+f"(d[t + 6]), \
      "+f"(d[t + 7])
  asm volatile(
      "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1;\n\t}"
      : FLASHMOE_EIGHT(0), FLASHMOE_EIGHT(8), FLASHMOE_EIGHT(16), FLASHMOE_EIGHT(24), FLASHMOE_EIGHT(32),
        FLASHMOE_EIGHT(40), FLASHMOE_EIGHT(48), FLASHMOE_EIGHT(56)
      : "l"(a), "l"(b), "r"(scale_d)
      : "memory");
#undef FLASHMOE_EIGHT
}

}  // namespace flashmoe::ptx
