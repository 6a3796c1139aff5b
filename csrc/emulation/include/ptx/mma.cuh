// Emulated: the signatures of csrc/ptx/mma.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/element_format.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

template <typename Element>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             Site site = Site::here()) {
  const uint32_t b[2] = {b0, b1};
  emulation::matrix_product(d, a, b, 16, ElementFormat<Element>::kFormat, site, "mma_m16n8k16");
}

template <typename Element>
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b0,
                                            Site site = Site::here()) {
  static_assert(ElementFormat<Element>::kFormat == emulation::Format::kF16, "m16n8k8 is modelled for fp16 (sm_75)");
  const uint32_t a[2] = {a0, a1};
  emulation::matrix_product(d, a, &b0, 8, ElementFormat<Element>::kFormat, site, "mma_m16n8k8");
}

}  // namespace flashmoe::ptx
