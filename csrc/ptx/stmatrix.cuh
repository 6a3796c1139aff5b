// stmatrix: the inverse of ldmatrix (sm_90). Four 8x8 matrices of 16-bit elements to shared memory: lane l passes the
// 16-byte address of row l % 8 of matrix l / 8, and in r[i] the elements (row l / 4, columns 2 * (l % 4) and the next)
// of matrix i.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void stmatrix_x4(void* smem_row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(smem_row)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace flashmoe::ptx
