// The first row of an expert.
#pragma once

#include "moe/params/gemm.h"
#include "ptx/memory.cuh"

namespace flashmoe::moe {

// expert: 0 to params.experts; an expert's rows end where those of the next one begin.
__device__ __forceinline__ int first_row_of(const GemmParams& params, int expert) {
  if (params.expert_offsets == nullptr) return expert == 0 ? 0 : params.slots;
  return static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert));
}

}  // namespace flashmoe::moe
