// TMA (sm_90): one thread copies a box of a tensor that a TensorMap describes. Coordinates are element indices,
// innermost dimension first. Elements outside the tensor read as the map's fill (zero here) and are not written. Shared
// addresses: 128-byte aligned, 1024-byte with the 128-byte swizzle.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tensor_map.h"

namespace flashmoe::ptx {

// L2 eviction priority of a copy, as createpolicy.fractional encodes it for the whole access.
enum class CacheHint : uint64_t {
  kEvictNormal = 0x1000000000000000ull,
  kEvictFirst = 0x12f0000000000000ull,
  kEvictLast = 0x14f0000000000000ull,
};

// `map` must be in kernel parameter (__grid_constant__), constant or global memory.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(map)) : "memory");
}

// Starts the copy of the box at (c0, c1, c2, c3) into shared memory; its bytes complete on `barrier`.
__device__ __forceinline__ void tma_load_4d(void* smem, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                            int c3, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
      "l"(static_cast<uint64_t>(hint))
      : "memory");
}

__device__ __forceinline__ void tma_load_5d(void* smem, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                            int c3, int c4, CacheHint hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(smem_address(smem)),
      "l"(reinterpret_cast<uint64_t>(map)), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4),
      "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// Starts the copy of a box from shared memory. Ordinary stores to `smem` need fence_proxy_async_shared() before it.
__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3,
                                             int c4) {
  asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(
                   reinterpret_cast<uint64_t>(map)),
               "r"(smem_address(smem)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

// Closes the group of the stores this thread started since the last call.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's store groups still read shared memory: the rest may be overwritten.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until at most kPending of this thread's store groups are incomplete (global writes done for the rest).
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace flashmoe::ptx
