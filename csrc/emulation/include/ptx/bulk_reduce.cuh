// Emulated: the signatures of csrc/ptx/bulk_reduce.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void bulk_store(float* gmem, const void* smem, int bytes, Site site = Site::here()) {
  emulation::bulk_copy(gmem, smem_address(smem, site), static_cast<uint32_t>(bytes), false, site, "bulk_store");
}

__device__ __forceinline__ void bulk_reduce_add(float* gmem, const void* smem, int bytes, Site site = Site::here()) {
  emulation::bulk_copy(gmem, smem_address(smem, site), static_cast<uint32_t>(bytes), true, site, "bulk_reduce_add");
}

}  // namespace flashmoe::ptx
