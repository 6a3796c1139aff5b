// Emulated: the signatures of csrc/ptx/bulk_load.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/tma.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, int bytes, Mbarrier* barrier, CacheHint hint,
                                          Site site = Site::here()) {
  (void)hint;
  emulation::bulk_load(smem_address(smem, site), gmem, static_cast<uint32_t>(bytes), smem_address(barrier, site), site,
                       "bulk_load");
}

}  // namespace flashmoe::ptx
