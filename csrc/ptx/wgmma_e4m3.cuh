// wgmma of 8-bit floats, A in registers (sm_90a); wgmma.cuh describes the accumulator and what must surround products.
//
// A of warp w (of 4), lane l, with g = l / 4 and t = l % 4, four values per word:
//   a[0], a[1] = rows 16w + g and 16w + g + 8, k 4t to 4t + 3;   a[2], a[3] = the same rows, k 4t + 16 to 4t + 19
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::ptx {

// Four values as pack_e4m3 rounds them; `first` lands in bits 0 to 7.
__device__ __forceinline__ uint32_t pack_four_e4m3(float first, float second, float third, float fourth) {
  uint32_t word;
  asm("{\n\t.reg .b16 low, high;\n\tcvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n\tcvt.rn.satfinite.e4m3x2.f32 high, %4, "
      "%3;\n\tmov.b32 %0, {low, high};\n\t}"
      : "=r"(word)
      : "f"(first), "f"(second), "f"(third), "f"(fourth));
  return word;
}

#define FLASHMOE_EIGHT(t)                                                                                     \
  "+f"(d[t]), "+f"(d[t + 1]), "+f"(d[t + 2]), "+f"(d[t + 3]), "+f"(d[t + 4]), "+f"(d[t + 5]), "+f"(d[t + 6]), \
      "+f"(d[t + 7])

// d = a * b (scale_d == 0) or d += a * b (scale_d == 1). B: kN rows of 32 k in shared memory, 128-byte swizzle.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                              uint64_t b, int scale_d) {
  static_assert(kN == 64 || kN == 128, "widths that a kernel has asked for");
  if constexpr (kN == 64) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %37, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
        "{%32, %33, %34, %35}, %36, p, 1, 1;\n\t}"
        : FLASHMOE_EIGHT(0), FLASHMOE_EIGHT(8), FLASHMOE_EIGHT(16), FLASHMOE_EIGHT(24)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(scale_d)
        : "memory");
  } else {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %69, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "{%64, %65, %66, %67}, %68, p, 1, 1;\n\t}"
        : FLASHMOE_EIGHT(0), FLASHMOE_EIGHT(8), FLASHMOE_EIGHT(16), FLASHMOE_EIGHT(24), FLASHMOE_EIGHT(32),
          FLASHMOE_EIGHT(40), FLASHMOE_EIGHT(48), FLASHMOE_EIGHT(56)
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(scale_d)
        : "memory");
  }
}

#undef FLASHMOE_EIGHT

}  // namespace flashmoe::ptx
