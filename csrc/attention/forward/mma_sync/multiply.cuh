// The two matrix products of a warp, S = Q K^T and O = P V, and their operands. Spec::multiply is the 16x8x16 product
// of the family; the operand layouts are those of mma.m16n8k16 (ptx/mma.cuh).
#pragma once

#include "device/convert.cuh"
#include "device/swizzle.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::mma_sync {

// A lane's start address in a tile for ldmatrix. Q and V: matrices 0 to 3 are (rows 0-7, left), (rows 8-15, left),
// (rows 0-7, right), (rows 8-15, right); K: (keys 0-7, left), (keys 0-7, right), (keys 8-15, left), (keys 8-15, right).
template <typename Spec>
__device__ __forceinline__ ColumnWalk<Spec::kHeadDim> rows_first_walk(ptx::SmemPointer tile_smem) {
  const int lane = ptx::recompute(ptx::lane_index());
  return {tile_smem, swizzled_offset<Spec::kHeadDim>(lane % 16, lane / 16)};
}

template <typename Spec>
__device__ __forceinline__ ColumnWalk<Spec::kHeadDim> columns_first_walk(ptx::SmemPointer tile_smem) {
  const int lane = ptx::recompute(ptx::lane_index());
  return {tile_smem, swizzled_offset<Spec::kHeadDim>(lane % 8 + lane / 16 * 8, lane / 8 % 2)};
}

// A warp's Q as A operands, [kWarpRows, kColumns]: kept in registers, or read from shared memory at every use.
template <typename Spec, int kColumns = Spec::kHeadDim, bool kInRegisters = Spec::kQueryInRegisters>
struct QueryOperand;

template <typename Spec, int kColumns>
struct QueryOperand<Spec, kColumns, true> {
  uint32_t Q_rmem[Spec::kMmaM][kColumns / 16][4];

  __device__ __forceinline__ explicit QueryOperand(ptx::SmemPointer warp_Q_smem) {
    const auto walk = rows_first_walk<Spec>(warp_Q_smem);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int k = 0; k < kColumns / 16; ++k) ptx::ldmatrix_x4(Q_rmem[m][k], walk.at(k, m));
  }

  __device__ __forceinline__ void get(uint32_t (&a)[Spec::kMmaM][4], int k) const {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[m][i] = Q_rmem[m][k][i];
  }
};

template <typename Spec, int kColumns>
struct QueryOperand<Spec, kColumns, false> {
  ColumnWalk<Spec::kHeadDim> walk;

  __device__ __forceinline__ explicit QueryOperand(ptx::SmemPointer warp_Q_smem)
      : walk(rows_first_walk<Spec>(warp_Q_smem)) {}

  __device__ __forceinline__ void get(uint32_t (&a)[Spec::kMmaM][4], int k) const {
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) ptx::ldmatrix_x4(a[m], walk.at(k, m));
  }
};

// S [kWarpRows, kBlockN] = Q K^T over kColumns columns. K_smem [kBlockN, kHeadDim] points to the first of them. Query:
// QueryOperand or any type with its get().
template <typename Spec, int kColumns = Spec::kHeadDim, typename Query>
__device__ __forceinline__ void multiply_query_key(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4], const Query& Q,
                                                   ptx::SmemPointer K_smem) {
  const auto walk = columns_first_walk<Spec>(K_smem);
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) S_rmem[m][n][i] = 0.0f;
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k) {
    uint32_t a[Spec::kMmaM][4];
    Q.get(a, k);
#pragma unroll
    for (int pair = 0; pair < Spec::kMmaN / 2; ++pair) {
      uint32_t b[4];  // two 8-key blocks, 16 columns of the head dim
      ptx::ldmatrix_x4(b, walk.at(k, pair));
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m) {
        Spec::multiply(S_rmem[m][2 * pair], a[m], b[0], b[1]);
        Spec::multiply(S_rmem[m][2 * pair + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// Makes the A operand of 16 keys from their S accumulators. Both layouts give a thread the same rows and columns, so
// lanes exchange nothing.
template <typename Spec>
__device__ __forceinline__ void probability_operand(uint32_t (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack<typename Spec::Element>(left[0], left[1]);
  a[1] = pack<typename Spec::Element>(left[2], left[3]);
  a[2] = pack<typename Spec::Element>(right[0], right[1]);
  a[3] = pack<typename Spec::Element>(right[2], right[3]);
}

// O += P V over keys 16 key_block to 16 key_block + 15 of V_smem [kBlockN, kHeadDim], which is read transposed.
template <typename Spec>
__device__ __forceinline__ void multiply_probability_value(float (&O_rmem)[Spec::kMmaM][Spec::kMmaD][4],
                                                           const uint32_t (&P_rmem)[Spec::kMmaM][4],
                                                           const ColumnWalk<Spec::kHeadDim>& V_walk, int key_block) {
#pragma unroll
  for (int pair = 0; pair < Spec::kMmaD / 2; ++pair) {
    uint32_t b[4];  // 16 keys, two 8-column blocks of the head dim
    ptx::ldmatrix_x4_trans(b, V_walk.at(pair, key_block));
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      Spec::multiply(O_rmem[m][2 * pair], P_rmem[m], b[0], b[1]);
      Spec::multiply(O_rmem[m][2 * pair + 1], P_rmem[m], b[2], b[3]);
    }
  }
}

}  // namespace flashmoe::attention::mma_sync
