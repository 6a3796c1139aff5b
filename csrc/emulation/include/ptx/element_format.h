// Maps the element type of a kernel template to a number format.
#pragma once

#include "emulation/numerics.h"
#include "ptx/elements.cuh"

namespace flashmoe::ptx {

// The 16-bit format that an element type names, and its conversions: to bits, rounded like the GPU, and to the value.
template <typename Element>
struct ElementFormat;

template <>
struct ElementFormat<F16> {
  static constexpr emulation::Format kFormat = emulation::Format::kF16;
  static uint16_t bits(float value) { return emulation::float_to_f16(value); }
  static float value(uint16_t bits) { return emulation::f16_to_float(bits); }
};

template <>
struct ElementFormat<BF16> {
  static constexpr emulation::Format kFormat = emulation::Format::kBF16;
  static uint16_t bits(float value) { return emulation::float_to_bf16(value); }
  static float value(uint16_t bits) { return emulation::bf16_to_float(bits); }
};

}  // namespace flashmoe::ptx
