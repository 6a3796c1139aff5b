// stmatrix of transposed matrices: lane l passes in r[i] the elements (rows 2 * (l % 4) and the next, column l / 4) of
// matrix i. Separate from stmatrix.cuh, which most sm90 kernels include.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void stmatrix_x4_trans(void* smem_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem_row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flashmoe::ptx
