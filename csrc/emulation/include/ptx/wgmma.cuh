// Emulated: the signatures of csrc/ptx/wgmma.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/element_format.h"
#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void wgmma_fence(Site site = Site::here()) { emulation::wgmma_fence(site, "wgmma_fence"); }

__device__ __forceinline__ void wgmma_commit(Site site = Site::here()) {
  emulation::wgmma_commit(site, "wgmma_commit");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait(Site site = Site::here()) {
  emulation::wgmma_wait(kPending, site, "wgmma_wait");
}

// A compiler barrier on the GPU; here the accumulators live in memory and need none.
template <int kCount>
__device__ __forceinline__ void wgmma_fence_operands(float (&d)[kCount]) {
  (void)d;
}

template <int kCount>
__device__ __forceinline__ void wgmma_fence_operands(uint32_t (&a)[kCount]) {
  (void)a;
}

__device__ __forceinline__ uint64_t make_smem_descriptor(const void* smem, int leading_bytes, int stride_bytes,
                                                         Site site = Site::here()) {
  constexpr uint64_t kSwizzle128 = 1;
  uint64_t descriptor = (emulation::shared_address(smem, site, "make_smem_descriptor") & 0x3ffff) >> 4;
  descriptor |= static_cast<uint64_t>(leading_bytes >> 4) << 16;
  descriptor |= static_cast<uint64_t>(stride_bytes >> 4) << 32;
  return descriptor | kSwizzle128 << 62;
}

__device__ __forceinline__ uint64_t advance_smem_descriptor(uint64_t descriptor, int bytes) {
  return descriptor + static_cast<uint64_t>(bytes >> 4);
}

template <typename Element, int kN, bool kTransposeB, bool kTransposeA = false>
__device__ __forceinline__ void wgmma_ss(float (&d)[kN / 2], uint64_t a, uint64_t b, int scale_d,
                                         Site site = Site::here()) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma takes N from 8 to 256 by 8");
  emulation::wgmma_product(d, kN, nullptr, false, a, b, kTransposeA, kTransposeB, scale_d,
                           ElementFormat<Element>::kFormat, site, "wgmma_ss");
}

// By reference, unlike the real one: the tensor cores read the registers until the wait, so the machine checks that the
// kernel does not change them. Temporaries, and values that are not adjacent, are copied instead.
template <typename Element, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], const uint32_t& a0, const uint32_t& a1, const uint32_t& a2,
                                         const uint32_t& a3, uint64_t b, int scale_d, Site site = Site::here()) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "wgmma takes N from 8 to 256 by 8");
  const bool in_place = &a1 == &a0 + 1 && &a2 == &a0 + 2 && &a3 == &a0 + 3;
  const uint32_t copies[4] = {a0, a1, a2, a3};
  emulation::wgmma_product(d, kN, in_place ? &a0 : copies, in_place, 0, b, false, kTransposeB, scale_d,
                           ElementFormat<Element>::kFormat, site, "wgmma_rs");
}

template <typename Element, int kN, bool kTransposeB>
__device__ __forceinline__ void wgmma_rs(float (&d)[kN / 2], uint32_t&& a0, uint32_t&& a1, uint32_t&& a2, uint32_t&& a3,
                                         uint64_t b, int scale_d, Site site = Site::here()) {
  const uint32_t copies[4] = {a0, a1, a2, a3};
  emulation::wgmma_product(d, kN, copies, false, 0, b, false, kTransposeB, scale_d, ElementFormat<Element>::kFormat,
                           site, "wgmma_rs");
}

}  // namespace flashmoe::ptx
