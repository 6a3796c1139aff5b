// Emulated: the signatures of csrc/ptx/e4m3.cuh plus the call site; a test holds the two against each other.
#pragma once

#include "ptx/wgmma.cuh"

namespace flashmoe {
namespace ptx {

__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  return emulation::float_to_e4m3(low) | static_cast<uint32_t>(emulation::float_to_e4m3(high)) << 8;
}

__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int scale_d,
                                                Site site = Site::here()) {
  emulation::wgmma_product(d, 128, nullptr, false, a, b, false, false, scale_d, emulation::Format::kE4M3, site,
                           "wgmma_e4m3_n128");
}

}  // namespace ptx
}  // namespace flashmoe
