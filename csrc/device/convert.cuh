// Conversions between fp32 and the 16-bit element types.
#pragma once

#include "ptx/convert.cuh"

namespace flashmoe {

using ptx::pack;
using ptx::unpack;

}  // namespace flashmoe
