// Copies bytes from global to shared memory by TMA (sm_90), without a tensor map.
#pragma once

#include "ptx/tma.cuh"

namespace flashmoe::ptx {

// Starts a copy of `bytes` (a multiple of 16, above zero) between 16-byte aligned addresses; completes on `barrier`.
__device__ __forceinline__ void bulk_load(void* smem, const void* gmem, int bytes, Mbarrier* barrier, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(smem_address(smem)),
      "l"(__cvta_generic_to_global(gmem)), "r"(bytes), "r"(smem_address(barrier)), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

}  // namespace flashmoe::ptx
