// The kernels before and after the fused backward kernel. Before: computes row_dot and zeroes the semaphores. After:
// converts the partials to dq.
#pragma once

#include "attention/backward/sm90/dq_partials.cuh"
#include "attention/params/fused_backward.h"
#include "attention/sequences.cuh"
#include "device/convert.cuh"
#include "device/exchange.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/ordered_semaphore.cuh"

namespace flashmoe::attention::backward::sm90 {

template <typename Element_, int kHeadDim_, int kNumWarps_>
struct FusedQuerySpec {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kNumThreads = 32 * kNumWarps_;
  static constexpr int kSharedBytes = 0;
  static_assert(kNumWarps_ == 4, "a warp has 16 of a partial's 64 rows");
};

// The semaphore of this block's partial: the number of tiles that have added to it.
template <typename Spec>
__device__ __forceinline__ int32_t* semaphore_of_partial(const FusedQueryParams& params) {
  const int64_t partials = static_cast<int64_t>(params.batch) * params.heads * ((params.rows + 63) / 64);
  return reinterpret_cast<int32_t*>(params.sums + partials * 64 * Spec::kHeadDim) + ptx::block_index();
}

// For a quad's row, if it is inside: the sum of out * dout over `columns` columns.
template <typename Spec>
__device__ __forceinline__ float sum_of_products(const typename Spec::Element* out_gmem,
                                                 const typename Spec::Element* dout_gmem, bool is_inside, int columns) {
  using Element = typename Spec::Element;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < Spec::kHeadDim / 32; ++i) {
    const int column = 32 * i + ptx::thread_index() % 4 * 8;
    uint32_t out[4] = {0, 0, 0, 0}, dout[4] = {0, 0, 0, 0};
    if (is_inside && column < columns) {
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
  return quad_sum(sum);
}

// One thread block per partial of 64 rows of one head; a quad processes one row at a time, as in the dq kernel.
template <typename Spec>
__device__ __forceinline__ void fused_prepare(const FusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const int partials = (params.rows + 63) / 64;
  const int64_t head = ptx::block_index() / partials;  // over batch and heads
  const int first_row = static_cast<int>(ptx::block_index() - head * partials) * 64;
  const int64_t batch = head / params.heads;
  const int64_t own_head = head - batch * params.heads;
  if (thread == 0) ptx::st_global_32(semaphore_of_partial<Spec>(params), 0);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + half * 32 + thread / 4;
    const bool is_inside = row < params.rows;
    const Element* out_gmem = static_cast<const Element*>(params.out) + batch * params.out_stride.batch +
                              own_head * params.out_stride.head + row * params.out_stride.row;
    const Element* dout_gmem = static_cast<const Element*>(params.dout) + batch * params.dout_stride.batch +
                               own_head * params.dout_stride.head + row * params.dout_stride.row;
    float sum = sum_of_products<Spec>(out_gmem, dout_gmem, is_inside, params.head_dim);
    if (thread % 4 == 0 && is_inside) {
      const int64_t at = head * params.rows + row;
      if (params.dlse != nullptr) sum -= ptx::ld_global_float(params.dlse + at);
      const bool is_visible = ptx::ld_global_float(params.lse + at) != ptx::negative_infinity();
      ptx::st_global_float(params.row_dot + at, is_visible ? sum : 0.0f);
    }
  }
}

// Converts a thread's elements of a partial of `width` columns, scales and stores them to its rows, `row` (at dq_gmem)
// and `row` + 8, if these are less than `rows`.
template <typename Spec, typename Params>
__device__ __forceinline__ void convert_rows(const Params& params, typename Spec::Element* dq_gmem,
                                             const float* partial_gmem, int width, int tiles, int thread, int row,
                                             int rows) {
  using Element = typename Spec::Element;
#pragma unroll
  for (int group = 0; group < Spec::kHeadDim / 32; ++group) {
    if (32 * group >= width) break;
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float4 sums{0.0f, 0.0f, 0.0f, 0.0f};
      if (tiles > 0) sums = ptx::ld_global_float4(partial_gmem + ((4 * group + i) * 128 + thread) * 4);
      first[i] = pack<Element>(sums.x * params.scale, sums.y * params.scale);
      second[i] = pack<Element>(sums.z * params.scale, sums.w * params.scale);
    }
    transpose_in_quad(first);
    transpose_in_quad(second);
    const int column = 32 * group + thread % 4 * 8;
    if (column < params.head_dim && row < rows) ptx::st_global_128(dq_gmem + column, first);
    if (column < params.head_dim && row + 8 < rows) {
      ptx::st_global_128(dq_gmem + column + 8 * params.dq_stride.row, second);
    }
  }
}

// One thread block per partial: see FusedQueries::publish_sums. Rows that see no key have no sums: zeros are stored.
// May run while the fused kernel's last tiles run: it converts a partial once all its tiles have added to it.
template <typename Spec>
__device__ __forceinline__ void fused_convert(const FusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const int partials = (params.rows + 63) / 64;
  const int64_t head = ptx::block_index() / partials;
  const int64_t batch = head / params.heads;
  const int first_row = static_cast<int>(ptx::block_index() - head * partials) * 64;
  const int row = first_row + thread / 32 * 16 + thread % 32 / 4;
  const float* partial_gmem = params.sums + static_cast<int64_t>(ptx::block_index()) * 64 * Spec::kHeadDim;
  Element* dq_gmem = static_cast<Element*>(params.dq) + batch * params.dq_stride.batch +
                     (head - batch * params.heads) * params.dq_stride.head + row * params.dq_stride.row;
  const int last_row = minimum(first_row + 64, params.rows) - 1;
  const int tiles = ceil_div(maximum(0, minimum(params.keys, params.row_keys + last_row)), kFusedTileKeys);
  if (thread == 0) ptx::semaphore_wait(semaphore_of_partial<Spec>(params), tiles);
  ptx::barrier_sync_block();
  convert_rows<Spec>(params, dq_gmem, partial_gmem, Spec::kHeadDim, tiles, thread, row, params.rows);
  // A grid that waits for this kernel also relies on dk and dv.
  if (ptx::block_index() == ptx::grid_size() - 1) ptx::grid_dependency_wait();
}

// The rows of a block's partial, varlen.
struct PartialRows {
  int head;
  int sequence;   // -1: the rows belong to none
  int first_row;  // in a dense tensor from the sequence's first row, in a ragged one from the tensor's
  int count;      // at most 64; 0 for an unused partial
  int used;       // those of them before row `rows` of the sequence
};

// Every warp searches the ranges of dq_partials.cuh for the last one whose partials begin no later than this one.
__device__ __forceinline__ PartialRows rows_of_partial(const VarlenFusedQueryParams& params) {
  const DqPartials partials{params.cu_seqlens_q != nullptr, params.rows_total, params.rows, params.batch};
  const int head = static_cast<int>(ptx::block_index() / partials.count());
  const int partial = static_cast<int>(ptx::block_index() - head * partials.count());
  if (!partials.is_ragged) {
    const int partials_of_sequence = ceil_div(params.rows, kDqPartialRows);
    const int sequence = partial / partials_of_sequence;
    const int row = (partial - sequence * partials_of_sequence) * kDqPartialRows;
    const int count = minimum(kDqPartialRows, params.rows - row);
    return PartialRows{head, sequence, row, count, count};
  }
  const auto boundary = [&](int index) {  // the first row of the index-th range
    if (index == 0) return 0;
    if (index > params.batch + 1) return params.rows_total;
    return maximum(0, minimum(params.rows_total, load_length(params.cu_seqlens_q + index - 1)));
  };
  int range = 0;
  for (int left = params.batch + 2; left > 1;) {
    const int step = ceil_div(left, 32);
    const int index = range + ptx::lane_index() * step;
    const bool is_before = index < range + left && boundary(index) / kDqPartialRows + index <= partial;
    const int before = maximum(1, ptx::population_count(ptx::vote_ballot(is_before)));
    range += (before - 1) * step;
    left = minimum(step, left - (before - 1) * step);
  }
  const int first_row = boundary(range);
  const int end_row = maximum(first_row, boundary(range + 1));
  const int row = (partial - first_row / kDqPartialRows - range) * kDqPartialRows;
  const int count = maximum(0, minimum(kDqPartialRows, end_row - first_row - row));
  const bool is_sequence = range > 0 && range <= params.batch;
  return PartialRows{head, is_sequence ? range - 1 : -1, first_row + row, count,
                     is_sequence ? minimum(count, params.rows - row) : 0};
}

__device__ __forceinline__ int32_t* semaphore_of_varlen_partial(const VarlenFusedQueryParams& params) {
  const DqPartials partials{params.cu_seqlens_q != nullptr, params.rows_total, params.rows, params.batch};
  const int64_t all = static_cast<int64_t>(partials.count()) * params.heads;
  return reinterpret_cast<int32_t*>(params.sums + all * kDqPartialRows * params.width) + ptx::block_index();
}

template <typename Spec>
__device__ __forceinline__ void varlen_fused_prepare(const VarlenFusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  if (thread == 0) ptx::st_global_32(semaphore_of_varlen_partial(params), 0);
  const PartialRows partial = rows_of_partial(params);
  const bool is_ragged = params.cu_seqlens_q != nullptr;
  const auto offset = [&](const Strides& stride, int row) {
    return (is_ragged ? 0 : partial.sequence * stride.batch) + partial.head * stride.head +
           (partial.first_row + static_cast<int64_t>(row)) * stride.row;
  };
  const int64_t first_statistic =
      is_ragged ? static_cast<int64_t>(partial.head) * params.rows_total
                : (static_cast<int64_t>(partial.sequence) * params.heads + partial.head) * params.rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = half * 32 + thread / 4;
    const bool is_used = row < partial.used;
    float sum = sum_of_products<Spec>(static_cast<const Element*>(params.out) + offset(params.out_stride, row),
                                      static_cast<const Element*>(params.dout) + offset(params.dout_stride, row),
                                      is_used, params.head_dim_v);
    if (thread % 4 != 0 || row >= partial.count) continue;
    const int64_t at = first_statistic + partial.first_row + row;
    bool is_visible = false;
    if (is_used) {
      if (params.dlse != nullptr) sum -= ptx::ld_global_float(params.dlse + at);
      is_visible = ptx::ld_global_float(params.lse + at) != ptx::negative_infinity();
    }
    ptx::st_global_float(params.row_dot + at, is_visible ? sum : 0.0f);
  }
}

// Runs after the fused kernel, not concurrently. Partials that no tile has added to have no sums: zeros are stored.
template <typename Spec>
__device__ __forceinline__ void varlen_fused_convert(const VarlenFusedQueryParams& params) {
  using Element = typename Spec::Element;
  const int thread = ptx::thread_index();
  const PartialRows partial = rows_of_partial(params);
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int64_t batch = params.cu_seqlens_q != nullptr ? 0 : partial.sequence;
  Element* dq_gmem = static_cast<Element*>(params.dq) + batch * params.dq_stride.batch +
                     partial.head * params.dq_stride.head +
                     (partial.first_row + static_cast<int64_t>(row)) * params.dq_stride.row;
  const float* partial_gmem = params.sums + static_cast<int64_t>(ptx::block_index()) * kDqPartialRows * params.width;
  const int tiles = partial.sequence < 0 ? 0 : static_cast<int>(ptx::ld_global_32(semaphore_of_varlen_partial(params)));
  convert_rows<Spec>(params, dq_gmem, partial_gmem, params.width, tiles, thread, row, partial.count);
}

}  // namespace flashmoe::attention::backward::sm90
