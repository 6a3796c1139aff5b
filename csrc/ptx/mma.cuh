// d += a * b on the tensor cores, fp32 accumulation. With g = lane / 4 and t = lane % 4:
//   d (16x8)   d[0..1] = (row g,     columns 2t, 2t+1)   d[2..3] = (row g + 8, columns 2t, 2t+1)
//   a (16xk)   a[0], a[1] = rows g and g + 8, k 2t, 2t+1;  a[2], a[3] = the same rows, k 2t+8, 2t+9 (k = 16 only)
//   b (kx8)    b0 = (k 2t, 2t+1; column g)               b1 = (k 2t+8, 2t+9; column g) (k = 16 only)
#pragma once

#include "ptx/elements.cuh"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <typename Element>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0);

#define FLASHMOE_DEFINE_MMA_K16(Element, type)                                                              \
  template <>                                                                                               \
  __device__ __forceinline__ void mma_m16n8k16<Element>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, \
                                                        uint32_t b1) {                                      \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                                              \
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                              \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                    \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                    \
  }

#define FLASHMOE_DEFINE_MMA_K8(Element, type)                                                                  \
  template <>                                                                                                  \
  __device__ __forceinline__ void mma_m16n8k8<Element>(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0) { \
    asm("mma.sync.aligned.m16n8k8.row.col.f32." type "." type                                                  \
        ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, "                                                     \
        "%2, %3};"                                                                                             \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
        : "r"(a0), "r"(a1), "r"(b0));                                                                          \
  }

#if __CUDA_ARCH__ >= 800
FLASHMOE_DEFINE_MMA_K16(F16, "f16")
FLASHMOE_DEFINE_MMA_K16(BF16, "bf16")
FLASHMOE_DEFINE_MMA_K16(XF16, "xf16")
#endif
FLASHMOE_DEFINE_MMA_K8(F16, "f16")
FLASHMOE_DEFINE_MMA_K8(XF16, "xf16")

#undef FLASHMOE_DEFINE_MMA_K16
#undef FLASHMOE_DEFINE_MMA_K8

}  // namespace flashmoe::ptx
