// Element type of a kernel template to number format.
#pragma once

#include "emulation/numerics.h"
#include "ptx/elements.cuh"

namespace flashmoe::ptx {

// Which 16-bit format an element type names, and its conversions: to bits as the GPU rounds, and to the value.
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
