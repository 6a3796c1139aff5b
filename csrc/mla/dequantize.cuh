// Converts 8-bit floats to 16-bit elements, the same that a 16-bit cache of the dequantised values holds.
#pragma once

#include "device/convert.cuh"
#include "ptx/e4m3.cuh"
#include "ptx/math.cuh"

namespace flashmoe::mla {

// Eight e4m3 values times their scale, in float32, rounded to elements: 16 bytes.
template <typename Element>
__device__ __forceinline__ void dequantize(uint32_t (&words)[4], uint32_t low, uint32_t high, float scale) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float values[4];
    ptx::widen_e4m3(values, i == 0 ? low : high);
    words[2 * i] = pack<Element>(values[0] * scale, values[1] * scale);
    words[2 * i + 1] = pack<Element>(values[2] * scale, values[3] * scale);
  }
}

}  // namespace flashmoe::mla
