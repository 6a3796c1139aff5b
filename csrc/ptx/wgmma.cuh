// wgmma (sm_90a): the 128 threads of a warpgroup multiply a 64x16 tile A by a 16xN tile B into a 64xN fp32 accumulator.
//
// The accumulator of warp w (of 4), lane l, with g = l / 4 and t = l % 4:
//   d[4j + 0..1] = (row 16w + g,     columns 8j + 2t and the next)
//   d[4j + 2..3] = (row 16w + g + 8, columns 8j + 2t and the next)
// A in registers (the _rs forms):
//   a[0], a[1] = rows 16w + g and 16w + g + 8, k 2t, 2t+1;   a[2], a[3] = the same rows, k 2t+8, 2t+9
//
// The instructions are asynchronous: from the issue until the wgmma_wait that covers them nothing may touch the
// accumulators or the registers of A. The order is wgmma_fence, products, wgmma_commit, wgmma_wait, then
// wgmma_fence_operands on the accumulators, which keeps the compiler from moving their uses above the wait.
#pragma once

#include "ptx/elements.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::ptx {

// Orders register and shared-memory accesses before the products that follow. One per batch.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Closes the group of the products issued since the last call.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler must take the registers as written here.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operands(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void wgmma_fence_operands(uint32_t (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Descriptor of an operand in shared memory in the 128-byte swizzle, as TMA writes it: rows of 64 16-bit elements (128
// bytes), 16-byte chunk c of row r stored at c ^ (r % 8). `smem` points into the first row, at most 127 bytes from its
// start; the slab that contains it is 1024-byte aligned.
//   stride_bytes   from one group of 8 rows to the next (1024 when rows are adjacent)
//   leading_bytes  operands with k across rows ("transposed"): from one 64-column slab to the next; otherwise unused
__device__ __forceinline__ uint64_t make_smem_descriptor(const void* smem, int leading_bytes, int stride_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  uint64_t descriptor = (smem_address(smem) & 0x3ffff) >> 4;
  descriptor |= static_cast<uint64_t>(leading_bytes >> 4) << 16;
  descriptor |= static_cast<uint64_t>(stride_bytes >> 4) << 32;
  return descriptor | kSwizzle128 << 62;
}

// The same operand `bytes` (a multiple of 16) further on. The sum stays in the low word; the moves show that to the
// compiler, unlike a 64-bit addition. It matters, because the tensor cores wait for descriptors.
__device__ __forceinline__ uint64_t advance_smem_descriptor(uint64_t descriptor, int bytes) {
  uint32_t low, high;
  uint64_t result;
  asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "l"(descriptor));
  low += static_cast<uint32_t>(bytes >> 4);
  asm("mov.b64 %0, {%1, %2};" : "=l"(result) : "r"(low), "r"(high));
  return result;
}

// d = a * b (scale_d == 0) or d += a * b (scale_d == 1). A: K-major (64 rows of k); kTransposeA, 16 rows of 64. B:
// K-major (kN rows of k); kTransposeB, 16 rows of kN.
template <typename Element, int kN, bool kTransposeB>
struct Wgmma;

// Operand lists for the asm statements. FLASHMOE_NUMBERS_10(3) is %30 to %39 and FLASHMOE_FLOATS_10(3) d[30] to d[39];
// FLASHMOE_NUMBERS_ALL_n() and FLASHMOE_FLOATS_ALL_n() are the first n.
#define FLASHMOE_NUMBERS_2(t) "%" #t "0, %" #t "1"
#define FLASHMOE_NUMBERS_4(t) FLASHMOE_NUMBERS_2(t) ", %" #t "2, %" #t "3"
#define FLASHMOE_NUMBERS_6(t) FLASHMOE_NUMBERS_4(t) ", %" #t "4, %" #t "5"
#define FLASHMOE_NUMBERS_8(t) FLASHMOE_NUMBERS_6(t) ", %" #t "6, %" #t "7"
#define FLASHMOE_NUMBERS_10(t) FLASHMOE_NUMBERS_8(t) ", %" #t "8, %" #t "9"
#define FLASHMOE_NUMBERS_ALL_4() FLASHMOE_NUMBERS_4()
#define FLASHMOE_NUMBERS_ALL_8() FLASHMOE_NUMBERS_8()
#define FLASHMOE_NUMBERS_ALL_16() FLASHMOE_NUMBERS_10() ", " FLASHMOE_NUMBERS_6(1)
#define FLASHMOE_NUMBERS_ALL_24() FLASHMOE_NUMBERS_10() ", " FLASHMOE_NUMBERS_10(1) ", " FLASHMOE_NUMBERS_4(2)
#define FLASHMOE_NUMBERS_ALL_30() FLASHMOE_NUMBERS_10() ", " FLASHMOE_NUMBERS_10(1) ", " FLASHMOE_NUMBERS_10(2)
#define FLASHMOE_NUMBERS_ALL_32() FLASHMOE_NUMBERS_ALL_30() ", " FLASHMOE_NUMBERS_2(3)
#define FLASHMOE_NUMBERS_ALL_40() FLASHMOE_NUMBERS_ALL_30() ", " FLASHMOE_NUMBERS_10(3)
#define FLASHMOE_NUMBERS_ALL_48() FLASHMOE_NUMBERS_ALL_40() ", " FLASHMOE_NUMBERS_8(4)
#define FLASHMOE_NUMBERS_ALL_60() FLASHMOE_NUMBERS_ALL_40() ", " FLASHMOE_NUMBERS_10(4) ", " FLASHMOE_NUMBERS_10(5)
#define FLASHMOE_NUMBERS_ALL_64() FLASHMOE_NUMBERS_ALL_60() ", " FLASHMOE_NUMBERS_4(6)
#define FLASHMOE_NUMBERS_ALL_80() FLASHMOE_NUMBERS_ALL_60() ", " FLASHMOE_NUMBERS_10(6) ", " FLASHMOE_NUMBERS_10(7)
#define FLASHMOE_NUMBERS_ALL_88() FLASHMOE_NUMBERS_ALL_80() ", " FLASHMOE_NUMBERS_8(8)
#define FLASHMOE_NUMBERS_ALL_90() FLASHMOE_NUMBERS_ALL_80() ", " FLASHMOE_NUMBERS_10(8)
#define FLASHMOE_NUMBERS_ALL_96() FLASHMOE_NUMBERS_ALL_90() ", " FLASHMOE_NUMBERS_6(9)
#define FLASHMOE_NUMBERS_ALL_112() \
  FLASHMOE_NUMBERS_ALL_90() ", " FLASHMOE_NUMBERS_10(9) ", " FLASHMOE_NUMBERS_10(10) ", " FLASHMOE_NUMBERS_2(11)
#define FLASHMOE_NUMBERS_ALL_120() \
  FLASHMOE_NUMBERS_ALL_90() ", " FLASHMOE_NUMBERS_10(9) ", " FLASHMOE_NUMBERS_10(10) ", " FLASHMOE_NUMBERS_10(11)
#define FLASHMOE_NUMBERS_ALL_128() FLASHMOE_NUMBERS_ALL_120() ", " FLASHMOE_NUMBERS_8(12)

#define FLASHMOE_FLOATS_2(t) "+f"(d[t##0]), "+f"(d[t##1])
#define FLASHMOE_FLOATS_4(t) FLASHMOE_FLOATS_2(t), "+f"(d[t##2]), "+f"(d[t##3])
#define FLASHMOE_FLOATS_6(t) FLASHMOE_FLOATS_4(t), "+f"(d[t##4]), "+f"(d[t##5])
#define FLASHMOE_FLOATS_8(t) FLASHMOE_FLOATS_6(t), "+f"(d[t##6]), "+f"(d[t##7])
#define FLASHMOE_FLOATS_10(t) FLASHMOE_FLOATS_8(t), "+f"(d[t##8]), "+f"(d[t##9])
#define FLASHMOE_FLOATS_ALL_4() FLASHMOE_FLOATS_4()
#define FLASHMOE_FLOATS_ALL_8() FLASHMOE_FLOATS_8()
#define FLASHMOE_FLOATS_ALL_16() FLASHMOE_FLOATS_10(), FLASHMOE_FLOATS_6(1)
#define FLASHMOE_FLOATS_ALL_24() FLASHMOE_FLOATS_10(), FLASHMOE_FLOATS_10(1), FLASHMOE_FLOATS_4(2)
#define FLASHMOE_FLOATS_ALL_30() FLASHMOE_FLOATS_10(), FLASHMOE_FLOATS_10(1), FLASHMOE_FLOATS_10(2)
#define FLASHMOE_FLOATS_ALL_32() FLASHMOE_FLOATS_ALL_30(), FLASHMOE_FLOATS_2(3)
#define FLASHMOE_FLOATS_ALL_40() FLASHMOE_FLOATS_ALL_30(), FLASHMOE_FLOATS_10(3)
#define FLASHMOE_FLOATS_ALL_48() FLASHMOE_FLOATS_ALL_40(), FLASHMOE_FLOATS_8(4)
#define FLASHMOE_FLOATS_ALL_60() FLASHMOE_FLOATS_ALL_40(), FLASHMOE_FLOATS_10(4), FLASHMOE_FLOATS_10(5)
#define FLASHMOE_FLOATS_ALL_64() FLASHMOE_FLOATS_ALL_60(), FLASHMOE_FLOATS_4(6)
#define FLASHMOE_FLOATS_ALL_80() FLASHMOE_FLOATS_ALL_60(), FLASHMOE_FLOATS_10(6), FLASHMOE_FLOATS_10(7)
#define FLASHMOE_FLOATS_ALL_88() FLASHMOE_FLOATS_ALL_80(), FLASHMOE_FLOATS_8(8)
#define FLASHMOE_FLOATS_ALL_90() FLASHMOE_FLOATS_ALL_80(), FLASHMOE_FLOATS_10(8)
#define FLASHMOE_FLOATS_ALL_96() FLASHMOE_FLOATS_ALL_90(), FLASHMOE_FLOATS_6(9)
#define FLASHMOE_FLOATS_ALL_112() \
  FLASHMOE_FLOATS_ALL_90(), FLASHMOE_FLOATS_10(9), FLASHMOE_FLOATS_10(10), FLASHMOE_FLOATS_2(11)
#define FLASHMOE_FLOATS_ALL_120() \
  FLASHMOE_FLOATS_ALL_90(), FLASHMOE_FLOATS_10(9), FLASHMOE_FLOATS_10(10), FLASHMOE_FLOATS_10(11)
#define FLASHMOE_FLOATS_ALL_128() FLASHMOE_FLOATS_ALL_120(), FLASHMOE_FLOATS_8(12)

// One element type and width: `count` is n / 2 accumulators, p0 to p6 the operand numbers that follow theirs.
#define FLASHMOE_DEFINE_WGMMA_TYPE(element, type, n, count, p0, p1, p2, p3, p4, p5, p6)                              \
  template <bool kTransposeB>                                                                                        \
  struct Wgmma<element, n, kTransposeB> {                                                                            \
    template <bool kTransposeA>                                                                                      \
    static __device__ __forceinline__ void ss(float (&d)[count], uint64_t a, uint64_t b, int scale_d) {              \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p2                                                      \
                   ", 0;\n\t"                                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                                   \
                   " {" FLASHMOE_NUMBERS_ALL_##count() "}, %" #p0 ", %" #p1 ", p, 1, 1, %" #p4 ", %" #p3 ";\n\t}"    \
                   : FLASHMOE_FLOATS_ALL_##count()                                                                   \
                   : "l"(a), "l"(b), "r"(scale_d), "n"(kTransposeB ? 1 : 0), "n"(kTransposeA ? 1 : 0)                \
                   : "memory");                                                                                      \
    }                                                                                                                \
    static __device__ __forceinline__ void rs(float (&d)[count], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, \
                                              uint64_t b, int scale_d) {                                             \
      asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" #p5                                                      \
                   ", 0;\n\t"                                                                                        \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                                   \
                   " {" FLASHMOE_NUMBERS_ALL_##count() "}, {%" #p0 ", %" #p1 ", %" #p2 ", %" #p3 "}, %" #p4          \
                                                       ", p, 1, 1, %" #p6 ";\n\t}"                                   \
                   : FLASHMOE_FLOATS_ALL_##count()                                                                   \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(scale_d), "n"(kTransposeB ? 1 : 0)              \
                   : "memory");                                                                                      \
    }                                                                                                                \
  };

#define FLASHMOE_DEFINE_WGMMA(n, count, p0, p1, p2, p3, p4, p5, p6)              \
  FLASHMOE_DEFINE_WGMMA_TYPE(F16, "f16", n, count, p0, p1, p2, p3, p4, p5, p6)   \
  FLASHMOE_DEFINE_WGMMA_TYPE(BF16, "bf16", n, count, p0, p1, p2, p3, p4, p5, p6) \
  FLASHMOE_DEFINE_WGMMA_TYPE(XF16, "xf16", n, count, p0, p1, p2, p3, p4, p5, p6)

FLASHMOE_DEFINE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
FLASHMOE_DEFINE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
FLASHMOE_DEFINE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
FLASHMOE_DEFINE_WGMMA(48, 24, 24, 25, 26, 27, 28, 29, 30)
FLASHMOE_DEFINE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
FLASHMOE_DEFINE_WGMMA(80, 40, 40, 41, 42, 43, 44, 45, 46)
FLASHMOE_DEFINE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
FLASHMOE_DEFINE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
FLASHMOE_DEFINE_WGMMA(160, 80, 80, 81, 82, 83, 84, 85, 86)
FLASHMOE_DEFINE_WGMMA(176, 88, 88, 89, 90, 91, 92, 93, 94)
FLASHMOE_DEFINE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
FLASHMOE_DEFINE_WGMMA(224, 112, 112, 113, 114, 115, 116, 117, 118)
FLASHMOE_DEFINE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

// A and B in shared memory.
template <typename Element, int kN, bool kTransposeB, bool kTransposeA = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int scale_d) {
  Wgmma<Element, kN, kTransposeB>::template ss<kTransposeA>(d, a, b, scale_d);
}

// A in registers, B in shared memory.
template <typename Element, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint64_t b, int scale_d) {
  Wgmma<Element, kN, kTransposeB>::rs(d, a0, a1, a2, a3, b, scale_d);
}

#undef FLASHMOE_NUMBERS_2
#undef FLASHMOE_NUMBERS_4
#undef FLASHMOE_NUMBERS_6
#undef FLASHMOE_NUMBERS_8
#undef FLASHMOE_NUMBERS_10
#undef FLASHMOE_NUMBERS_ALL_4
#undef FLASHMOE_NUMBERS_ALL_8
#undef FLASHMOE_NUMBERS_ALL_16
#undef FLASHMOE_NUMBERS_ALL_24
#undef FLASHMOE_NUMBERS_ALL_30
#undef FLASHMOE_NUMBERS_ALL_32
#undef FLASHMOE_NUMBERS_ALL_40
#undef FLASHMOE_NUMBERS_ALL_48
#undef FLASHMOE_NUMBERS_ALL_60
#undef FLASHMOE_NUMBERS_ALL_64
#undef FLASHMOE_NUMBERS_ALL_80
#undef FLASHMOE_NUMBERS_ALL_88
#undef FLASHMOE_NUMBERS_ALL_90
#undef FLASHMOE_NUMBERS_ALL_96
#undef FLASHMOE_NUMBERS_ALL_112
#undef FLASHMOE_NUMBERS_ALL_120
#undef FLASHMOE_NUMBERS_ALL_128
#undef FLASHMOE_FLOATS_2
#undef FLASHMOE_FLOATS_4
#undef FLASHMOE_FLOATS_6
#undef FLASHMOE_FLOATS_8
#undef FLASHMOE_FLOATS_10
#undef FLASHMOE_FLOATS_ALL_4
#undef FLASHMOE_FLOATS_ALL_8
#undef FLASHMOE_FLOATS_ALL_16
#undef FLASHMOE_FLOATS_ALL_24
#undef FLASHMOE_FLOATS_ALL_30
#undef FLASHMOE_FLOATS_ALL_32
#undef FLASHMOE_FLOATS_ALL_40
#undef FLASHMOE_FLOATS_ALL_48
#undef FLASHMOE_FLOATS_ALL_60
#undef FLASHMOE_FLOATS_ALL_64
#undef FLASHMOE_FLOATS_ALL_80
#undef FLASHMOE_FLOATS_ALL_88
#undef FLASHMOE_FLOATS_ALL_90
#undef FLASHMOE_FLOATS_ALL_96
#undef FLASHMOE_FLOATS_ALL_112
#undef FLASHMOE_FLOATS_ALL_120
#undef FLASHMOE_FLOATS_ALL_128
#undef FLASHMOE_DEFINE_WGMMA_TYPE
#undef FLASHMOE_DEFINE_WGMMA

}  // namespace flashmoe::ptx
