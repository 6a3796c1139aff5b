// Emulated: the signatures of csrc/ptx/e4m3.cuh plus the call site; a test holds the two against each other.
#pragma once

#include "ptx/wgmma.cuh"

namespace flashmoe {
namespace ptx {

__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  return emulation::float_to_e4m3(low) | static_cast<uint32_t>(emulation::float_to_e4m3(high)) << 8;
}

__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                                  Site site = Site::here()) {
  const uint32_t b[2] = {b0, b1};
  emulation::matrix_product(d, a, b, 32, emulation::Format::kE4M3, site, "mma_m16n8k32_e4m3");
}

__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int scale_d,
                                                Site site = Site::here()) {
  emulation::wgmma_product(d, 128, nullptr, false, a, b, false, false, scale_d, emulation::Format::kE4M3, site,
                           "wgmma_e4m3_n128");
}

}  // namespace ptx
}  // namespace flashmoe
