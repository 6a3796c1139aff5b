// Converts 4-bit weights to bf16 (params/mxfp4.h). A code's exponent placed in the lowest two exponent bits of a bf16,
// and its mantissa bit in the highest mantissa bit, give the code's value times 2^-126; this also holds for code 1,
// which is subnormal in both formats. One multiplication by 2^(126 + b - 127) then gives the weight.
//
// That factor is a bf16 for b up to 127. Beyond that a first multiplication scales the value to its own size and a
// second one applies the scale: such scales are 2 and more, which trained weights do not have.
#pragma once

#include "moe/params/mxfp4.h"
#include "ptx/bf16x2.cuh"
#include "ptx/permute.cuh"
#include "ptx/types.cuh"

namespace flashmoe::moe {

// Whether any of four scales is too large for a single factor.
__device__ __forceinline__ bool has_large_scale(uint32_t scales) { return (scales & 0x80808080u) != 0; }

// The values of codes 3 and 7 (counted from the lowest) of a word, times 2^-126. Shift the word for other codes.
__device__ __forceinline__ uint32_t spread_codes(uint32_t word) {
  return (word & 0x80008000u) | (word >> 6 & 0x01C001C0u);
}

// The same for codes 2 i and 2 i + 1. shifted: the word times 16.
__device__ __forceinline__ uint32_t spread_neighbours(uint32_t word, uint32_t shifted, int i) {
  constexpr uint32_t kFirst = 0x4000u, kNext = 0x1010u;  // only bytes 1 and 3 matter
  return spread_codes(ptx::permute_bytes(shifted, word, kFirst + static_cast<uint32_t>(i) * kNext));
}

// The values of a packed block's codes (moe/params/mxfp4.h), as spread_codes gives them: eight pairs from two words.
// Each word gives three pairs, with at most one shift or rotation and one mask each; the remaining bits of both,
// merged, give the other two.
__device__ __forceinline__ uint32_t rotate_left(uint32_t word, int bits) { return word << bits | word >> (32 - bits); }

__device__ __forceinline__ void spread_packed(uint32_t (&pairs)[8], uint32_t first, uint32_t second) {
  constexpr uint32_t kMask = 0x81C081C0u, kLeft = 0x0C180C18u;
  pairs[0] = first & kMask;
  pairs[1] = first << 6 & kMask;
  pairs[2] = rotate_left(first, 26) & kMask;
  pairs[3] = second & kMask;
  pairs[4] = second << 6 & kMask;
  pairs[5] = rotate_left(second, 26) & kMask;
  const uint32_t rest = (first & kLeft) | (rotate_left(second, 2) & ~kLeft);
  pairs[6] = rotate_left(rest, 28) & kMask;
  pairs[7] = rest << 2 & kMask;
}

// One of four scales.
__device__ __forceinline__ uint32_t scale_byte(uint32_t scales, int byte) {
  return ptx::permute_bytes(scales, 0, 0x4440u + static_cast<uint32_t>(byte));
}

// Any scale as a product of two factors: a scale that a single factor can represent (per byte the smaller of it and
// 127), and a bf16 of 1 or more.
__device__ __forceinline__ uint32_t smaller_scales(uint32_t scales) {
  return (scales | (scales >> 7 & 0x01010101u) * 0x7Fu) & 0x7F7F7F7Fu;
}
__device__ __forceinline__ uint32_t rest_of_scale(uint32_t scale) {
  const uint32_t half = scale == 255 ? 0x7FFFu : scale < 127 ? 0x3F80u : scale << 7;
  return half * 0x00010001u;
}

// One scale for both halves of a pair. kIsLarge: any scale; otherwise scales below 128.
template <bool kIsLarge>
struct Mxfp4Scale {
  uint32_t factor;

  __device__ __forceinline__ explicit Mxfp4Scale(uint32_t scale) {
    if constexpr (kIsLarge) {
      // 2^-127 is subnormal. NaN also has a mantissa bit set.
      const uint32_t half = scale == 0 ? 0x0040u : scale == 255 ? 0x7FFFu : scale << 7;
      factor = half * 0x00010001u;
    } else {
      factor = scale * 0x00800080u + 0x3F003F00u;  // exponents of scale + 126
    }
  }

  // Applies the scale to spread codes.
  __device__ __forceinline__ uint32_t apply(uint32_t codes) const {
    constexpr uint32_t kTwoTo126 = 0x7E807E80u;  // 2^126
    return ptx::multiply_bf16x2(kIsLarge ? ptx::multiply_bf16x2(codes, kTwoTo126) : codes, factor);
  }
};

}  // namespace flashmoe::moe
