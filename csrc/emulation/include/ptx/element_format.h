// Element type of a kernel template to number format.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "emulation/numerics.h"

namespace flashmoe {
namespace ptx {

// Which 16-bit format an element type names.
template <typename Element>
struct ElementFormat;

template <>
struct ElementFormat<__half> {
  static constexpr emulation::Format kFormat = emulation::Format::kF16;
};

template <>
struct ElementFormat<__nv_bfloat16> {
  static constexpr emulation::Format kFormat = emulation::Format::kBF16;
};

}  // namespace ptx
}  // namespace flashmoe
