// Used by both kernels in addition to the products of forward/mma_sync/multiply.cuh: P and dS as left operands, in
// registers or through shared memory, and the store of a gradient.
#pragma once

#include "attention/backward/mma_sync/spec.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "device/swizzle.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention::backward::mma_sync {

using attention::mma_sync::columns_first_walk;
using attention::mma_sync::multiply_probability_value;
using attention::mma_sync::multiply_query_key;
using attention::mma_sync::probability_operand;
using attention::mma_sync::QueryOperand;
using attention::mma_sync::rows_first_walk;

template <typename Spec>
using Scores = float[Spec::kMmaM][Spec::kMmaN][4];
template <typename Spec>
using Gradient = float[Spec::kMmaM][Spec::kMmaD][4];
template <typename Spec>
using Operand = uint32_t[Spec::kMmaN / 2][Spec::kMmaM][4];  // a warp's slice of P or dS, by 16 rows of the stream

template <typename Spec>
__device__ __forceinline__ void clear(Gradient<Spec>& gradient) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) gradient[m][d][i] = 0.0f;
}

template <typename Spec>
__device__ __forceinline__ void make_operand(Operand<Spec>& operand, const Scores<Spec>& scores) {
#pragma unroll
  for (int step = 0; step < Spec::kMmaN / 2; ++step)
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
      probability_operand<Spec>(operand[step][m], scores[m][2 * step], scores[m][2 * step + 1]);
}

// A group's P or dS of one block: [kStreamRows / 16][kMmaM][32 lanes][16 bytes], the registers of a lane adjacent.
template <typename Spec>
struct GroupOperand {
  ptx::SmemPointer lane_smem;

  __device__ __forceinline__ GroupOperand(ptx::SmemPointer smem, const WarpCoordinates<Spec>& warp, int index)
      : lane_smem(smem + (Spec::kOperandOffset + index * Spec::kOperandBytes + warp.group * Spec::kGroupOperandBytes +
                          ptx::lane_index() * 16)) {}

  __device__ __forceinline__ ptx::SmemPointer at(int step, int m) const {
    return lane_smem + (step * Spec::kMmaM + m) * 512;
  }
  __device__ __forceinline__ void store(const WarpCoordinates<Spec>& warp, const Operand<Spec>& operand) const {
#pragma unroll
    for (int step = 0; step < Spec::kMmaN / 2; ++step)
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m)
        ptx::st_shared_128(at(warp.slice * (Spec::kMmaN / 2) + step, m), operand[step][m]);
  }
};

// gradient += operand stream, over all rows of the block: [kWarpRows, kWarpColumns]. With a sharing warp, which
// computes the other half of the operand, all of it is read from shared memory.
template <typename Spec>
__device__ __forceinline__ void accumulate(Gradient<Spec>& gradient, const Operand<Spec>& operand,
                                           const GroupOperand<Spec>& shared, ptx::SmemPointer stream_smem) {
  const auto walk = rows_first_walk<Spec>(stream_smem);
#pragma unroll
  for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
    if constexpr (Spec::kSharers == 1) {
      multiply_probability_value<Spec>(gradient, operand[step], walk, step);
    } else {
      uint32_t a[Spec::kMmaM][4];
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m) ptx::ld_shared_128(a[m], shared.at(step, m));
      multiply_probability_value<Spec>(gradient, a, walk, step);
    }
  }
}

// Stores gradient * factor to global memory, through the group's own rows in `group_smem`, which are no longer read.
// `rows`: the number of valid rows from the group's first. A lane stores 16 bytes, eight lanes 64 columns of a row.
template <typename Spec>
__device__ __forceinline__ void store_gradient(void* tensor, const Strides& stride, int64_t first, int rows,
                                               int head_dim, const WarpCoordinates<Spec>& warp,
                                               const Gradient<Spec>& gradient, float factor,
                                               ptx::SmemPointer group_smem) {
  using Element = typename Spec::Element;
  const int lane = ptx::recompute(ptx::lane_index());
  const int first_chunk = warp.first_column() / kChunkElements;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + lane / 4;
        ptx::st_shared_32(group_smem + (swizzled_offset<Spec::kHeadDim>(row, first_chunk + d) + lane % 4 * 4),
                          pack<Element>(gradient[m][d][2 * half] * factor, gradient[m][d][2 * half + 1] * factor));
      }
  ptx::warp_sync();  // read after write: each row was written by several lanes
  Element* gmem = static_cast<Element*>(tensor) + first;
#pragma unroll
  for (int pass = 0; pass < Spec::kWarpRows / 4; ++pass) {
    const int row = pass * 4 + lane / kSegmentChunks;
#pragma unroll
    for (int segment = 0; segment < Spec::kWarpColumns / 64; ++segment) {
      const int chunk = first_chunk + segment * kSegmentChunks + lane % kSegmentChunks;
      if (row < rows && chunk * kChunkElements < head_dim) {
        uint32_t value[4];
        ptx::ld_shared_128(value, group_smem + swizzled_offset<Spec::kHeadDim>(row, chunk));
        ptx::st_global_128(gmem + row * stride.row + chunk * kChunkElements, value);
      }
    }
  }
}

}  // namespace flashmoe::attention::backward::mma_sync
