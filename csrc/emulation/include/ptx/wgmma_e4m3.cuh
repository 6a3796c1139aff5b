// Emulated: the signatures of csrc/ptx/wgmma_e4m3.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/e4m3.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t pack_four_e4m3(float first, float second, float third, float fourth) {
  return pack_e4m3(first, second) | pack_e4m3(third, fourth) << 16;
}

// By reference, like wgmma_rs of wgmma.cuh.
template <int kN>
__device__ __forceinline__ void wgmma_e4m3_rs(float (&d)[kN / 2], const uint32_t& a0, const uint32_t& a1,
                                              const uint32_t& a2, const uint32_t& a3, uint64_t b, int scale_d,
                                              Site site = Site::here()) {
  const bool in_place = &a1 == &a0 + 1 && &a2 == &a0 + 2 && &a3 == &a0 + 3;
  const uint32_t copies[4] = {a0, a1, a2, a3};
  emulation::wgmma_product(d, kN, in_place ? &a0 : copies, in_place, 0, b, false, false, scale_d,
                           emulation::Format::kE4M3, site, "wgmma_e4m3_rs");
}

}  // namespace flashmoe::ptx
