// 8-bit floats with 4 bits of exponent and 3 of fraction (e4m3fn: no infinity, largest 448, NaN 0x7f and 0xff): conversion and
// products (sm_90a; mma from sm_89 on). wgmma.cuh says how the 64xN accumulator lies in registers, and what stands around the products.
#pragma once

#include "ptx/wgmma.cuh"

namespace flashmoe {
namespace ptx {

// Rounds to nearest even, beyond 448 to 448; NaN stays NaN. `low` lands in bits 0 to 7, the lower address.
__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// d += a * b, 16x32 by 32x8. Registers as in mma.cuh's m16n8k16, each with four values where there it has two.
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

}  // namespace ptx
}  // namespace flashmoe
