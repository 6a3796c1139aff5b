// Puts the rows of tokens into the order of the sorted slots: rows[r] = a[a_slots[r] / top_k]. Rows past the experts' last are left
// alone: no product stores what comes of them. Grid: a warp a row.
#pragma once

#include "device/convert.cuh"
#include "moe/params/routing.h"
#include "ptx/grid_dependency.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace moe {

template <typename Element_, int kNumWarps_>
struct GatherSpec {
  using Element = Element_;
  static constexpr int kNumWarps = kNumWarps_;
  static constexpr int kNumThreads = 32 * kNumWarps;
  static constexpr int kSharedBytes = 0;
  static constexpr int kChunkElements = 8;  // one 16-byte load
  static constexpr int kChunksInFlight = 4;
};

// A lane takes every 32nd chunk of 16 bytes, kChunksInFlight of them at a time.
template <typename Spec>
__device__ __forceinline__ void gather(const GatherParams& params) {
  using Element = typename Spec::Element;
  constexpr int kStep = 32 * Spec::kChunkElements;
  // Hazard: the grid in front may still read what `rows` held before.
  ptx::grid_dependency_wait();
  ptx::grid_launch_dependents();
  const int row = ptx::block_index() * Spec::kNumWarps + ptx::warp_index();
  if (row >= static_cast<int>(ptx::ld_global_32(params.expert_offsets + params.experts))) return;
  const int token = static_cast<int>(ptx::ld_global_32(params.a_slots + row)) / params.top_k;
  const Element* from = static_cast<const Element*>(params.a) + token * params.a_stride;
  Element* to = static_cast<Element*>(params.rows) + static_cast<int64_t>(row) * params.columns;
  const int first = ptx::lane_index() * Spec::kChunkElements;
  for (int column = first; column < params.columns; column += Spec::kChunksInFlight * kStep) {
    uint32_t data[Spec::kChunksInFlight][4];
#pragma unroll
    for (int i = 0; i < Spec::kChunksInFlight; ++i) {
      if (column + i * kStep < params.columns) ptx::ld_global_128(data[i], from + column + i * kStep);
    }
#pragma unroll
    for (int i = 0; i < Spec::kChunksInFlight; ++i) {
      if (column + i * kStep < params.columns) ptx::st_global_128(to + column + i * kStep, data[i]);
    }
  }
}

}  // namespace moe
}  // namespace flashmoe
