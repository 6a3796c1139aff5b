// Tensor maps, which describe tensors to TMA. An operation describes each in a plain struct beside the kernel that
// takes it (address, dims, strides_bytes, box, element_strides, innermost first); these functions make the driver's
// object from it.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "host/kernel_table.h"

namespace flashmoe::host {

// Calls cuTensorMapEncodeTiled with a 128-byte swizzle; throws code `driver` if the driver is older than 12.0. `name`:
// the tensor's, for error messages. `promotion`: how much an L2 miss fetches. 256 bytes is best for weights (a layer of
// Mixtral with 32 tokens takes 353 us, with 128 bytes 379), but not for keys that are read once
// (attention/host/varlen.cpp) or for e4m3 weights (moe/host/tensor_maps.cpp).
CUtensorMap encode_tensor_map(Dtype dtype, int32_t rank, void* address, const uint64_t* dims,
                              const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* element_strides,
                              const char* name, CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B);

template <class Description>
CUtensorMap encode_tensor_map(const Description& from, Dtype dtype, const char* name,
                              CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  constexpr auto kRank = static_cast<int32_t>(std::extent_v<decltype(from.dims)>);
  static_assert(std::extent_v<decltype(from.strides_bytes)> == kRank - 1 &&
                    std::extent_v<decltype(from.box)> == kRank &&
                    std::extent_v<decltype(from.element_strides)> == kRank,
                "a description has one rank");
  return encode_tensor_map(dtype, kRank, from.address, from.dims, from.strides_bytes, from.box, from.element_strides,
                           name, promotion);
}

}  // namespace flashmoe::host
