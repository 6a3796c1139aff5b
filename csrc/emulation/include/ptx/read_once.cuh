// Emulated: the signatures of csrc/ptx/read_once.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/cp_async.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void ld_global_128(uint32_t (&value)[4], const void* gmem, CachePolicy policy,
                                              Site site = Site::here()) {
  static_cast<void>(policy);
  emulation::load_global(value, gmem, 16, site, "ld_global_128");
}

}  // namespace flashmoe::ptx
