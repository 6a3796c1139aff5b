// The 16-bit floating-point types that kernels are templated on. They name a number format and hold its bits;
// arithmetic is in fp32.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

struct F16 {
  uint16_t bits;
};

struct BF16 {
  uint16_t bits;
};

// Either of the two: where an instruction names the type, its PTX says `xf16`, which the build replaces with `f16` and
// `bf16` (flashmoe_build/compile/elements.py). One run of NVRTC serves both.
struct XF16 {
  uint16_t bits;
};

// Whether the type is still open: for the assertions of code that depends on it.
template <typename Element>
constexpr bool kIsEither = false;
template <>
constexpr bool kIsEither<XF16> = true;

}  // namespace flashmoe::ptx
