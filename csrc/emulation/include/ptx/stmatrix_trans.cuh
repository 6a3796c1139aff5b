// Emulated: the signatures of csrc/ptx/stmatrix_trans.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void stmatrix_x4_trans(void* smem_row, const uint32_t (&r)[4], Site site = Site::here()) {
  emulation::store_matrix(smem_address(smem_row, site), r, 4, true, site, "stmatrix_x4_trans");
}

}  // namespace flashmoe::ptx
