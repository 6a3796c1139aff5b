// Emulated: the signatures of csrc/ptx/ldmatrix.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SmemPointer smem_row, Site site = Site::here()) {
  emulation::load_matrix(r, smem_row.address, 4, false, site, "ldmatrix_x4");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SmemPointer smem_row, Site site = Site::here()) {
  emulation::load_matrix(r, smem_row.address, 4, true, site, "ldmatrix_x4_trans");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], SmemPointer smem_row, Site site = Site::here()) {
  emulation::load_matrix(r, smem_row.address, 2, false, site, "ldmatrix_x2");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], SmemPointer smem_row, Site site = Site::here()) {
  emulation::load_matrix(r, smem_row.address, 2, true, site, "ldmatrix_x2_trans");
}

}  // namespace flashmoe::ptx
