// ldmatrix: 8x8 matrices of 16-bit elements from shared memory. Lane l passes the address of row l % 8 of matrix l / 8
// (16-byte aligned, 16 bytes long); the x2 forms read the addresses of lanes 0 to 15 only. Lane l receives in r[i] the
// elements (row l / 4, columns 2 * (l % 4) and the next) of matrix i; with .trans, of the transposed matrix.
#pragma once

#include "ptx/memory.cuh"

namespace flashmoe::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], SmemPointer smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(smem_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], SmemPointer smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(smem_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], SmemPointer smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(smem_row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], SmemPointer smem_row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(smem_row))
               : "memory");
}

}  // namespace flashmoe::ptx
