// Copies tokens' rows into the order of the sorted slots: rows[slot_rows[slot]] = a[slot / top_k]. Rows past the
// experts' last one are not written: no product stores what it computes from them. Grid: one warp per token, so that a
// token is read once for all its choices.
#pragma once

#include "device/convert.cuh"
#include "moe/params/routing.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe {

template <typename Element_, int kNumWarps_>
struct GatherSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static constexpr int kChunkElements = 8;  // one 16-byte load
  static constexpr int kChunksInFlight = 4;
};

// Each lane copies every 32nd chunk of 16 bytes, kChunksInFlight at a time. Lane i holds the row of choice i.
template <typename Spec>
__device__ __forceinline__ void gather(const GatherParams& params) {
  using Element = typename Spec::Element;
  constexpr int kStep = 32 * Spec::kChunkElements;
  // Hazard: the previous grid may still read the old contents of `rows`.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int token = ptx::block_index() * Spec::kNumWarps + ptx::warp_index();
  if (token >= params.tokens) return;
  const int lane = ptx::lane_index();
  const int64_t slot = static_cast<int64_t>(token) * params.top_k + lane;
  const int lane_row = lane < params.top_k ? static_cast<int>(ptx::ld_global_32(params.slot_rows + slot)) : -1;
  const Element* from = static_cast<const Element*>(params.a) + token * params.a_stride;
  const int first = lane * Spec::kChunkElements;
  for (int start = 0; start < params.columns; start += Spec::kChunksInFlight * kStep) {
    const int column = start + first;
    uint32_t data[Spec::kChunksInFlight][4];
#pragma unroll
    for (int i = 0; i < Spec::kChunksInFlight; ++i) {
      if (column + i * kStep < params.columns) ptx::ld_global_128(data[i], from + column + i * kStep);
    }
    for (int choice = 0; choice < params.top_k; ++choice) {
      const int row = ptx::shuffle_index(lane_row, choice);
      if (row < 0) continue;
      Element* to = static_cast<Element*>(params.rows) + static_cast<int64_t>(row) * params.columns + column;
#pragma unroll
      for (int i = 0; i < Spec::kChunksInFlight; ++i) {
        if (column + i * kStep < params.columns) ptx::st_global_128(to + i * kStep, data[i]);
      }
    }
  }
}

}  // namespace flashmoe::moe
