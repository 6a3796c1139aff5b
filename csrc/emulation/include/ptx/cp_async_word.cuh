// Emulated: the signatures of csrc/ptx/cp_async_word.cuh plus the call site; a test compares the two.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void cp_async_4(SmemPointer smem, const void* gmem, Site site = Site::here()) {
  emulation::copy_async(smem.address, gmem, 4, 4, site, "cp_async_4");
}

}  // namespace flashmoe::ptx
