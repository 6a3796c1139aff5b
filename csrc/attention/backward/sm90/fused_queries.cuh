// What runs before and after the fused backward kernel. Before: row_dot, and zero turns. After: the sums to dq.
#pragma once

#include "attention/params/fused_backward.h"
#include "device/convert.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/turns.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

template <typename Element_, int kHeadDim_, int kNumWarps_>
struct FusedQuerySpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kSharedBytes = 0;
  static_assert(kNumWarps_ == 4, "a warp has 16 of a piece's 64 rows");
};

// The number of tiles that have added to this block's piece.
template <typename Spec>
__device__ __forceinline__ int32_t* turn_of_piece(const FusedQueryParams& params) {
  const int64_t pieces = static_cast<int64_t>(params.batch) * params.heads * ((params.rows + 63) / 64);
  return reinterpret_cast<int32_t*>(params.sums + pieces * 64 * Spec::kHeadDim) + ptx::block_index();
}

// A block of threads is a piece of 64 rows of one head; a quad has a row at a time, as in the kernel of dq.
template <typename Spec>
__device__ __forceinline__ void fused_prepare(const FusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const int pieces = (params.rows + 63) / 64;
  const int64_t head = ptx::block_index() / pieces;  // over batch and heads
  const int first_row = static_cast<int>(ptx::block_index() - head * pieces) * 64;
  const int64_t batch = head / params.heads;
  const int64_t own_head = head - batch * params.heads;
  if (thread == 0) ptx::st_global_32(turn_of_piece<Spec>(params), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + half * 32 + thread / 4;
    const bool is_inside = row < params.rows;
    const Element* out_gmem = static_cast<const Element*>(params.out) + batch * params.out_stride.batch +
                              own_head * params.out_stride.head + row * params.out_stride.row;
    const Element* dout_gmem = static_cast<const Element*>(params.dout) + batch * params.dout_stride.batch +
                               own_head * params.dout_stride.head + row * params.dout_stride.row;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < Spec::kHeadDim / 32; ++i) {
      const int column = 32 * i + thread % 4 * 8;
      uint32_t out[4] = {0, 0, 0, 0}, dout[4] = {0, 0, 0, 0};
      if (is_inside && column < params.head_dim) {
        ptx::ld_global_128(out, out_gmem + column);
        ptx::ld_global_128(dout, dout_gmem + column);
      }
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 a = unpack<Element>(out[w]);
        const float2 b = unpack<Element>(dout[w]);
        sum = ptx::fma_rn(a.x, b.x, sum);
        sum = ptx::fma_rn(a.y, b.y, sum);
      }
    }
    sum = quad_sum(sum);
    if (thread % 4 == 0 && is_inside) {
      const int64_t at = head * params.rows + row;
      if (params.dlse != nullptr) sum -= ptx::ld_global_float(params.dlse + at);
      const bool is_visible = ptx::ld_global_float(params.lse + at) != ptx::negative_infinity();
      ptx::st_global_float(params.row_dot + at, is_visible ? sum : 0.0f);
    }
  }
}

// v[i] of lane t of a quad becomes v[t] of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&v)[4]) {
  const bool odd = ptx::lane_index() % 2 != 0;
  const bool upper = ptx::lane_index() / 2 % 2 != 0;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = ptx::shuffle_xor(odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t received = ptx::shuffle_xor(upper ? v[i] : v[i + 2], 2);
    (upper ? v[i] : v[i + 2]) = received;
  }
}

// A block of threads is a piece: see FusedQueries::hand_over. Rows that see no key have no sums: zeros. It may be
// launched while the fused kernel's last tiles run: it converts each piece once all its tiles have added.
template <typename Spec>
__device__ __forceinline__ void fused_convert(const FusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const int pieces = (params.rows + 63) / 64;
  const int64_t head = ptx::block_index() / pieces;
  const int64_t batch = head / params.heads;
  const int first_row = static_cast<int>(ptx::block_index() - head * pieces) * 64;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
  const float* piece_gmem = params.sums + static_cast<int64_t>(ptx::block_index()) * 64 * Spec::kHeadDim;
  Element* dq_gmem = static_cast<Element*>(params.dq) + batch * params.dq_stride.batch +
                     (head - batch * params.heads) * params.dq_stride.head + row * params.dq_stride.row;
  const int last_row = minimum(first_row + 64, params.rows) - 1;
  const int tiles = ceil_div(maximum(0, minimum(params.keys, params.row_keys + last_row)), kFusedTileKeys);
  if (thread == 0) ptx::wait_for_turn(turn_of_piece<Spec>(params), tiles);
  ptx::barrier_sync_block();
#pragma unroll
  for (int group = 0; group < Spec::kHeadDim / 32; ++group) {
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};
      if (tiles > 0) sums = ptx::ld_global_float4(piece_gmem + ((4 * group + i) * 128 + thread) * 4);
      first[i] = pack<Element>(sums.x * params.scale, sums.y * params.scale);
      second[i] = pack<Element>(sums.z * params.scale, sums.w * params.scale);
    }
    transpose_in_quad(first);
    transpose_in_quad(second);
    const int column = 32 * group + thread % 4 * 8;
    if (column < params.head_dim && row < params.rows) ptx::st_global_128(dq_gmem + column, first);
    if (column < params.head_dim && row + 8 < params.rows) {
      ptx::st_global_128(dq_gmem + column + 8 * params.dq_stride.row, second);
    }
  }
  // Whoever waits for this kernel relies on dk and dv, too.
  if (ptx::block_index() == ptx::grid_size() - 1) ptx::grid_dependency_wait();
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
