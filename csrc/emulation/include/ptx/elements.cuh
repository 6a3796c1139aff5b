// Emulated: the types of csrc/ptx/elements.cuh. Kernels are compiled for each of them separately.
#pragma once

#include "ptx/types.cuh"

namespace flashmoe::ptx {

struct F16 {
  uint16_t bits;
};

struct BF16 {
  uint16_t bits;
};

template <typename Element>
constexpr bool kIsEither = false;

}  // namespace flashmoe::ptx
