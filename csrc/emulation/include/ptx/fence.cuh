// Emulated: the signatures of csrc/ptx/fence.cuh plus the call site; a test compares the two.
#pragma once

#include "emulation/machine.h"
#include "ptx/types.cuh"

namespace flashmoe::ptx {

using emulation::Site;

__device__ __forceinline__ void fence_proxy_async_shared(Site site = Site::here()) {
  emulation::fence_proxy_async(site, "fence_proxy_async_shared");
}

}  // namespace flashmoe::ptx
