// From 4-bit weights to bf16 (params/mxfp4.h). A code's exponent and mantissa as the lowest bit but one of bf16's exponent and what
// stands beside it are the code's number times 2^-126, of the code 1, which is subnormal here as there, too. One product with
// 2^(126 + b - 127) makes the weight of it.
//
// That factor is a bf16 for b up to 127. Beyond, the first product takes it to its own size and a second one to its scale's: such
// scales are 2 and more, of which trained weights have none.
#pragma once

#include "moe/params/mxfp4.h"
#include "ptx/bf16x2.cuh"
#include "ptx/permute.cuh"
#include "ptx/types.cuh"

namespace flashmoe {
namespace moe {

// Any of four scales beyond what one factor can be.
__device__ __forceinline__ bool has_large_scale(uint32_t scales) { return (scales & 0x80808080u) != 0; }

// The numbers of codes 3 and 7 (from the lowest on) of a word, times 2^-126. Of others, shift them there.
__device__ __forceinline__ uint32_t spread_codes(uint32_t word) {
  return (word & 0x80008000u) | (word >> 6 & 0x01C001C0u);
}

// The same of codes 2 i and 2 i + 1. shifted: the word times 16.
__device__ __forceinline__ uint32_t spread_neighbours(uint32_t word, uint32_t shifted, int i) {
  constexpr uint32_t kFirst = 0x4000u, kNext = 0x1010u;  // bytes 1 and 3 alone count
  return spread_codes(ptx::permute_bytes(shifted, word, kFirst + static_cast<uint32_t>(i) * kNext));
}

// One scale for both halves of a pair. kIsLarge: any scale, else below 128.
template <bool kIsLarge>
struct Mxfp4Scale {
  uint32_t factor;

  __device__ __forceinline__ explicit Mxfp4Scale(uint32_t scale) {
    if constexpr (kIsLarge) {
      // 2^-127 is subnormal. NaN has a bit of the mantissa set, too.
      const uint32_t half = scale == 0 ? 0x0040u : scale == 255 ? 0x7FFFu : scale << 7;
      factor = half * 0x00010001u;
    } else {
      factor = scale * 0x00800080u + 0x3F003F00u;  // exponents of scale + 126
    }
  }

  // Of spread codes.
  __device__ __forceinline__ uint32_t apply(uint32_t codes) const {
    constexpr uint32_t kOwnSize = 0x7E807E80u;  // 2^126
    return ptx::multiply_bf16x2(kIsLarge ? ptx::multiply_bf16x2(codes, kOwnSize) : codes, factor);
  }
};

}  // namespace moe
}  // namespace flashmoe
