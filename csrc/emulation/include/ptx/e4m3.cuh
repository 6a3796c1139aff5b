// Emulated: the signatures of csrc/ptx/e4m3.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/convert.cuh"
#include "ptx/permute.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ uint32_t round_to_e4m3(float value) { return emulation::float_to_e4m3(value); }

__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  return emulation::float_to_e4m3(low) | static_cast<uint32_t>(emulation::float_to_e4m3(high)) << 8;
}

struct E4M3 {
  unsigned char bits;
};

template <typename Element>
__device__ __forceinline__ void unpack_e4m3(uint32_t (&pairs)[2], uint32_t codes) {
  const auto value = [&](int byte) { return emulation::e4m3_to_float(static_cast<uint8_t>(codes >> 8 * byte)); };
  pairs[0] = pack<Element>(value(0), value(1));
  pairs[1] = pack<Element>(value(2), value(3));
}

template <typename Element>
__device__ __forceinline__ void unpack_alternate_e4m3(uint32_t (&pairs)[2], uint32_t codes) {
  unpack_e4m3<Element>(pairs, permute_bytes(codes, 0, 0x3120));
}

__device__ __forceinline__ void widen_e4m3(float (&values)[4], uint32_t codes) {
  for (int i = 0; i < 4; ++i) values[i] = emulation::e4m3_to_float(static_cast<uint8_t>(codes >> 8 * i));
}

__device__ __forceinline__ void st_global_e4m3(void* gmem, uint32_t code, Site site = Site::here()) {
  const uint8_t byte = static_cast<uint8_t>(code);
  emulation::store_global(gmem, &byte, 1, site, "st_global_e4m3");
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

}  // namespace flashmoe::ptx
