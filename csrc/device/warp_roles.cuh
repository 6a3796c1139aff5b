// The start of a warp-specialised kernel.
#pragma once

#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tensor_map.h"
#include "ptx/tma.cuh"

namespace flashmoe {

// One thread prefetches the tensor maps and initialises the barriers (init). Returns the warp, by which roles are given: the shuffle
// tells the compiler that it is the same in the whole warp. A barrier of the block must follow before the barriers are used.
template <typename Init, typename... Maps>
__device__ __forceinline__ int start_warp_roles(Init init, const Maps*... maps) {
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  if (warp == 0 && ptx::elect_one()) {
    (ptx::prefetch_tensor_map(maps), ...);
    init();
  }
  return warp;
}

}  // namespace flashmoe
