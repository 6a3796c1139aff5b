// Sums the rows of each token's choices.
//
//   moe_combine            out[t] = sum over choices of row_weights[row] * rows[row], + shared[t]
//   moe_combine_backward   dx[t] = sum over choices of rows[row], and dweights
//
// Sums are fp32, over the choices in their order. Grid: one block per token or, with few tokens, several that share the
// token's columns among their warps. A warp takes 256 columns at a time, 8 per lane: 16-byte loads, eight rows in
// flight. Lane i holds the row of choice i, so there are at most 32 choices.
#pragma once

#include "device/reduce.cuh"
#include "moe/eight_elements.cuh"
#include "moe/params/routing.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

constexpr int kLaneColumns = 8;  // one 16-byte load
constexpr int kWarpColumns = 32 * kLaneColumns;
constexpr int kRowsInFlight = 8;
constexpr int kWideChunks = 2;  // chunks of 256 columns

template <typename Element_, int kNumWarps_>
struct CombineSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
};

// sum += weight * the 8 elements of `data`.
template <typename Element>
__device__ __forceinline__ void add_scaled(float (&sum)[kLaneColumns], const uint32_t (&data)[4], float weight) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(data[i]);
    sum[2 * i] = ptx::fma_rn(weight, pair.x, sum[2 * i]);
    sum[2 * i + 1] = ptx::fma_rn(weight, pair.y, sum[2 * i + 1]);
  }
}

// Sums this lane's columns, 8 in each of kChunks chunks of 256. row, weight: those of choice `lane`; row is -1 if there
// is none. Eight rows are in flight, or eight / kChunks of wider ones.
template <typename Element, int kChunks>
__device__ __forceinline__ void sum_choices(const CombineParams& params, const int (&columns)[kChunks], int row,
                                            float weight, float (&sum)[kChunks][kLaneColumns]) {
  constexpr int kRows = kRowsInFlight / kChunks;
  const Element* rows_gmem = static_cast<const Element*>(params.rows);
#pragma unroll
  for (int i = 0; i < kChunks * kLaneColumns; ++i) sum[i / kLaneColumns][i % kLaneColumns] = 0.0f;
  for (int first = 0; first < params.top_k; first += kRows) {
    uint32_t data[kRows][kChunks][4];
    uint32_t loaded = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int choice_row = ptx::shuffle_index(row, first + i);
      if (first + i < params.top_k && choice_row >= 0) {  // the same in all lanes
        loaded |= 1u << i;
        const Element* row_gmem = rows_gmem + static_cast<int64_t>(choice_row) * params.columns;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)  // lanes past the last column load the first ones
          ptx::ld_global_128(data[i][chunk], row_gmem + (columns[chunk] < params.columns ? columns[chunk] : 0));
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float choice_weight = ptx::shuffle_index(weight, first + i);
      if (!(loaded >> i & 1)) continue;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) add_scaled<Element>(sum[chunk], data[i][chunk], choice_weight);
    }
  }
}

// The token of this warp, and the warp's index and count among the token's warps.
struct TokenWarp {
  int64_t token;
  int index, count;
};

template <typename Spec>
__device__ __forceinline__ TokenWarp token_warp(const CombineParams& params) {
  const int blocks = ptx::grid_size() / params.tokens;  // per token
  const int token = ptx::block_index() / blocks;
  const int block = ptx::block_index() - token * blocks;
  return {token, block * Spec::kNumWarps + ptx::warp_index(), blocks * Spec::kNumWarps};
}

// The row of this lane's choice, or -1.
__device__ __forceinline__ int choice_row(const CombineParams& params, int64_t token) {
  const int lane = ptx::lane_index();
  if (lane >= params.top_k) return -1;
  return static_cast<int>(ptx::ld_global_32(params.slot_rows + token * params.top_k + lane));
}

// Combines a warp's columns of a token, kChunks * 256 at a time: wide chunks of a row load faster, narrow ones give
// work to more warps.
template <typename Element, int kChunks>
__device__ __forceinline__ void combine_columns(const CombineParams& params, const TokenWarp& warp, int row,
                                                float weight) {
  constexpr int kColumns = kChunks * kWarpColumns;
  for (int start = warp.index * kColumns; start < params.columns; start += warp.count * kColumns) {
    int columns[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) columns[i] = start + i * kWarpColumns + ptx::lane_index() * kLaneColumns;
    uint32_t shared[kChunks][4];
    const Element* shared_gmem = static_cast<const Element*>(params.shared) + warp.token * params.shared_stride;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if (params.shared != nullptr && columns[i] < params.columns)
        ptx::ld_global_128(shared[i], shared_gmem + columns[i]);
    float sum[kChunks][kLaneColumns];
    sum_choices<Element>(params, columns, row, weight, sum);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      if (columns[i] >= params.columns) continue;
      if (params.shared != nullptr) add_scaled<Element>(sum[i], shared[i], 1.0f);
      store_eight(static_cast<Element*>(params.out) + warp.token * params.out_stride + columns[i], sum[i]);
    }
  }
}

template <typename Spec>
__device__ __forceinline__ void combine(const CombineParams& params) {
  using Element = typename Spec::Element;
  const TokenWarp warp = token_warp<Spec>(params);
  const int64_t token = warp.token;
  // What the sort wrote may be read before the wait: the previous product starts this kernel only when the kernel
  // before it has ended.
  const int row = choice_row(params, token);
  float weight = 1.0f;
  if (row >= 0 && params.row_weights != nullptr) weight = ptx::ld_global_float(params.row_weights + row);
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  if (ptx::grid_size() > params.tokens) {
    combine_columns<Element, 1>(params, warp, row, weight);
  } else {
    combine_columns<Element, kWideChunks>(params, warp, row, weight);
  }
}

// The expert that owns `row`: the last one whose first row is not past it. Two steps of a 32-way search over at most
// 1024 experts.
__device__ __forceinline__ int expert_of_row(const CombineParams& params, int row) {
  int first = 0;
#pragma unroll 1
  for (int step = (params.experts + 31) / 32;; step = 1) {
    const int expert = first + step * ptx::lane_index();
    const bool is_before =
        expert < params.experts && static_cast<int>(ptx::ld_global_32(params.expert_offsets + expert)) <= row;
    first += (ptx::population_count(ptx::vote_ballot(is_before)) - 1) * step;
    if (step == 1) return first;
  }
}

// dout[token] . b2[expert], the same in all lanes.
template <typename Element>
__device__ __forceinline__ float bias_dot(const CombineParams& params, int64_t token, int row) {
  constexpr int kLoads = 4;  // loads of each operand in flight
  const int64_t expert = expert_of_row(params, row);
  const Element* dout_gmem = static_cast<const Element*>(params.dout) + token * params.dout_stride;
  const Element* bias_gmem = static_cast<const Element*>(params.bias) + expert * params.columns;
  float sum = 0.0f;
#pragma unroll 1
  for (int start = ptx::lane_index() * kLaneColumns; start < params.columns; start += kLoads * kWarpColumns) {
    uint32_t dout[kLoads][4] = {}, bias[kLoads][4] = {};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int column = start + i * kWarpColumns;
      if (column >= params.columns) continue;
      ptx::ld_global_128(dout[i], dout_gmem + column);
      ptx::ld_global_128(bias[i], bias_gmem + column);
    }
#pragma unroll
    for (int i = 0; i < 4 * kLoads; ++i) {
      const float2 a = unpack<Element>(dout[i / 4][i % 4]), b = unpack<Element>(bias[i / 4][i % 4]);
      sum = ptx::fma_rn(a.x, b.x, sum);
      sum = ptx::fma_rn(a.y, b.y, sum);
    }
  }
  return warp_sum(sum);
}

// Sums row_dots[tile][row] over the tiles, in their order; the result is the same in all lanes.
__device__ __forceinline__ float sum_dots(const CombineParams& params, int row) {
  const int64_t slots = static_cast<int64_t>(params.tokens) * params.top_k;
  float sum = 0.0f;
  for (int start = 0; start < params.dot_tiles; start += 32) {
    const int tile = start + ptx::lane_index();
    const float dot = tile < params.dot_tiles ? ptx::ld_global_float(params.row_dots + tile * slots + row) : 0.0f;
    for (int i = 0; i < 32 && start + i < params.dot_tiles; ++i) sum += ptx::shuffle_index(dot, i);
  }
  return sum;
}

template <typename Spec>
__device__ __forceinline__ void combine_backward(const CombineParams& params) {
  using Element = typename Spec::Element;
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const TokenWarp warp = token_warp<Spec>(params);
  const int64_t token = warp.token;
  const int row = choice_row(params, token);
  const int columns = params.out != nullptr ? params.columns : 0;
  for (int start = warp.index * kWarpColumns; start < columns; start += warp.count * kWarpColumns) {
    const int column[1] = {start + ptx::lane_index() * kLaneColumns};
    float sum[1][kLaneColumns];
    sum_choices<Element>(params, column, row, 1.0f, sum);
    if (column[0] >= columns) continue;
    store_eight(static_cast<Element*>(params.out) + token * params.out_stride + column[0], sum[0]);
  }
  if (params.dweights == nullptr) return;
  for (int choice = warp.index; choice < params.top_k; choice += warp.count) {
    const int dot_row = ptx::shuffle_index(row, choice);  // the same in the whole warp
    float dot = 0.0f;
    if (dot_row >= 0) {
      dot = sum_dots(params, dot_row);
      if (params.bias != nullptr) dot += bias_dot<Element>(params, token, dot_row);
    }
    if (ptx::lane_index() == 0) ptx::st_global_float(params.dweights + token * params.top_k + choice, dot);
  }
}

}  // namespace flashmoe::moe
