// Emulated: the signatures of csrc/ptx/tma.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/mbarrier.cuh"
#include "ptx/tensor_map.h"

namespace flashmoe::ptx {

using emulation::Site;

enum class CacheHint : uint64_t {
  kEvictNormal = 0x1000000000000000ull,
  kEvictFirst = 0x12f0000000000000ull,
  kEvictLast = 0x14f0000000000000ull,
};

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap* map, Site site = Site::here()) {
  emulation::prefetch_tensor_map(map, site, "prefetch_tensor_map");
}

__device__ __forceinline__ void tma_load_4d(void* smem, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                            int c3, CacheHint hint, Site site = Site::here()) {
  (void)hint;
  const int coordinates[4] = {c0, c1, c2, c3};
  emulation::tensor_load(smem_address(smem, site), map, smem_address(barrier, site), 4, coordinates, site,
                         "tma_load_4d");
}

__device__ __forceinline__ void tma_load_5d(void* smem, const TensorMap* map, Mbarrier* barrier, int c0, int c1, int c2,
                                            int c3, int c4, CacheHint hint, Site site = Site::here()) {
  (void)hint;
  const int coordinates[5] = {c0, c1, c2, c3, c4};
  emulation::tensor_load(smem_address(smem, site), map, smem_address(barrier, site), 5, coordinates, site,
                         "tma_load_5d");
}

__device__ __forceinline__ void tma_store_4d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3,
                                             Site site = Site::here()) {
  const int coordinates[4] = {c0, c1, c2, c3};
  emulation::tensor_store(map, smem_address(smem, site), 4, coordinates, site, "tma_store_4d");
}

__device__ __forceinline__ void tma_store_5d(const TensorMap* map, const void* smem, int c0, int c1, int c2, int c3,
                                             int c4, Site site = Site::here()) {
  const int coordinates[5] = {c0, c1, c2, c3, c4};
  emulation::tensor_store(map, smem_address(smem, site), 5, coordinates, site, "tma_store_5d");
}

__device__ __forceinline__ void tma_store_commit(Site site = Site::here()) {
  emulation::tensor_store_commit(site, "tma_store_commit");
}

template <int kPending>
__device__ __forceinline__ void tma_store_wait_read(Site site = Site::here()) {
  emulation::tensor_store_wait(kPending, site, "tma_store_wait_read");
}

template <int kPending>
__device__ __forceinline__ void tma_store_wait(Site site = Site::here()) {
  emulation::tensor_store_wait(kPending, site, "tma_store_wait");
}

}  // namespace flashmoe::ptx
