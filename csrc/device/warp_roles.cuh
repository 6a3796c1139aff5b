// The start of a warp-specialised kernel.
#pragma once

#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/tensor_map.h"
#include "ptx/tma.cuh"

namespace flashmoe {

template <typename... Maps>
__device__ __forceinline__ void prefetch_tensor_maps(const Maps*... maps) {
  (ptx::prefetch_tensor_map(maps), ...);
}

// By which roles are given; known to the compiler to be the same in the whole warp.
struct WarpRole {
  int warp;
  int warpgroup;
};

// One thread prefetches the tensor maps and initialises the barriers (init). A barrier of the block must follow before they are used.
template <typename Init, typename... Maps>
__device__ __forceinline__ WarpRole start_warp_roles(Init init, const Maps*... maps) {
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  const int warpgroup = warp / 4;
  if (warp == 0 && ptx::elect_one()) {
    prefetch_tensor_maps(maps...);
    init();
  }
  return WarpRole{warp, warpgroup};
}

}  // namespace flashmoe
