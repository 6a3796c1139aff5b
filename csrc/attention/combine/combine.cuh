// Second pass of split attention: the partial outputs of num_splits blocks, each normalised over its own keys, become one.
//
//   out = sum_i exp(lse_i - lse) * out_i,   lse = ln(sum_i exp(lse_i))
//
// One warp a query row; lane i holds the weight of split i, so num_splits is at most 32. Grid: ceil(rows / kBlockM) blocks,
// rows = batch * heads_q * seq_q.
#pragma once

#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/forward/tile.cuh"
#include "attention/params/forward.h"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm80 {

// kBlockM rows per block, kBlockN the most splits.
template <typename Element_, int kHeadDim_, int kBlockM_, int kBlockN_, int kNumStages_, int kNumWarps_>
struct CombineSpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static_assert(kBlockM == kNumWarps, "one warp per row");
  static_assert(kBlockN_ == 32, "one lane per split");
  static_assert(kNumStages_ == 1, "nothing is staged");
};

// out_gmem and partial_gmem: this row's [head_dim]; the partial outputs of one row are split_stride floats apart.
template <typename Spec>
__device__ __forceinline__ void combine_row(const ForwardParams& params, float weight, const float* partial_gmem,
                                            int64_t split_stride, typename Spec::Element* out_gmem) {
  constexpr int kColumns = 4;  // of a lane: one 16-byte load
#pragma unroll
  for (int start = 0; start < Spec::kHeadDim; start += 32 * kColumns) {
    const int column = start + ptx::lane_index() * kColumns;
    const bool valid = column < params.head_dim;
    float sum[kColumns] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int split = 0; split < params.num_splits; ++split) {  // unrolled: loads in flight together
      const float split_weight = ptx::shuffle_index(weight, split);
      // A split without a visible key for this row has weight 0.
      if (valid && split_weight != 0.0f) {
        const float4 partial = ptx::ld_global_float4(partial_gmem + split * split_stride + column);
        sum[0] = ptx::fma_rn(split_weight, partial.x, sum[0]);
        sum[1] = ptx::fma_rn(split_weight, partial.y, sum[1]);
        sum[2] = ptx::fma_rn(split_weight, partial.z, sum[2]);
        sum[3] = ptx::fma_rn(split_weight, partial.w, sum[3]);
      }
    }
    const uint32_t packed[2] = {pack<typename Spec::Element>(sum[0], sum[1]),
                                pack<typename Spec::Element>(sum[2], sum[3])};
    if (valid) ptx::st_global_64(out_gmem + column, packed);
  }
}

template <typename Spec>
__device__ __forceinline__ void combine(const ForwardParams& params) {
  const int64_t rows = static_cast<int64_t>(params.batch) * params.heads_q * params.seq_q;
  const int64_t row = static_cast<int64_t>(ptx::block_index()) * Spec::kBlockM + ptx::warp_index();
  if (row >= rows) return;
  const int lane = ptx::lane_index();
  ptx::grid_dependency_wait();
  const float lse_split = lane < params.num_splits ? ptx::ld_global_float(params.lse_partial + lane * rows + row)
                                                   : ptx::negative_infinity();
  const float lse_max = warp_max(lse_split);
  const bool is_empty = lse_max == ptx::negative_infinity();  // no split saw a key
  const float exponential = is_empty ? 0.0f : ptx::exp2_approx((lse_split - lse_max) * (1.0f / kLn2));
  const float sum = warp_sum(exponential);
  const float weight = is_empty ? 0.0f : exponential / sum;
  if (lane == 0 && params.lse != nullptr)
    ptx::st_global_float(params.lse + row, is_empty ? lse_max : lse_max + ptx::lg2_approx(sum) * kLn2);

  const int64_t head = row / params.seq_q;  // over batch and heads
  const int64_t batch = head / params.heads_q;
  typename Spec::Element* out_gmem =
      static_cast<typename Spec::Element*>(params.out) + batch * params.out_stride.batch +
      (head - batch * params.heads_q) * params.out_stride.head + (row - head * params.seq_q) * params.out_stride.row;
  combine_row<Spec>(params, weight, params.out_partial + row * params.head_dim, rows * params.head_dim, out_gmem);
}

}  // namespace flashmoe::attention::sm80
