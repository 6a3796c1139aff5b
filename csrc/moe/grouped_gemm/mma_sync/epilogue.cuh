// Epilogues: a tile's sums are stored as they are, through the activation, or through its gradient.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/grouped_gemm/mma_sync/schedule.cuh"
#include "moe/grouped_gemm/mma_sync/staging.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::moe::mma_sync {

// d[d_row + row] = accum (+ bias), for the columns below num_columns. bias: that of the expert, or null.
template <typename Spec>
__device__ __forceinline__ void store_plain(const GemmParams& params, const Tile& tile, int64_t d_row, int num_columns,
                                            const void* bias, const Accumulator<Spec>& accum,
                                            ptx::SmemPointer staging_smem) {
  using Element = typename Spec::Element;
  const int column = tile.column_tile * Spec::kBlockN + LaneColumns<Spec, 8>::column();
  const bool has_column = column < num_columns;
  float added[8] = {};
  if (bias != nullptr && has_column) load_eight(added, static_cast<const Element*>(bias) + column);
  Element* d_gmem = static_cast<Element*>(params.d) + d_row * params.d_stride + column;
  for_each_row<8>(accum, staging_smem, [&](int row, float (&values)[8]) {
    if (!has_column || row >= tile.rows) return;
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] += added[i];
    store_eight(d_gmem + row * params.d_stride, values);
  });
}

// For a tile of z, whose columns are gate and up interleaved by eights or (kIsInterleaved) one by one: stores d =
// activation(z), from the fp32 sums, and z itself in the order of the weights' rows.
template <typename Spec, bool kIsInterleaved>
__device__ __forceinline__ void store_activation(const GemmParams& params, const Tile& tile,
                                                 const Accumulator<Spec>& accum, ptx::SmemPointer staging_smem) {
  using Element = typename Spec::Element;
  const int width = params.n / 2;
  const int column = (tile.column_tile * Spec::kBlockN + LaneColumns<Spec, 16>::column()) / 2;
  const bool has_column = column < width;
  const bool is_interleaved = kIsInterleaved || params.is_interleaved != 0;
  float gate_bias[8] = {}, up_bias[8] = {};
  if (params.bias != nullptr && has_column) {
    const Element* bias_gmem = static_cast<const Element*>(params.bias) + static_cast<int64_t>(tile.expert) * params.n;
    load_gate_up(gate_bias, up_bias, bias_gmem, column, width, is_interleaved);
  }
  Element* d_gmem = static_cast<Element*>(params.d) + tile.row * params.d_stride + column;
  Element* z_gmem = static_cast<Element*>(params.preactivation);
  for_each_row<16>(accum, staging_smem, [&](int row, float (&values)[16]) {
    if (!has_column || row >= tile.rows) return;
    float gate[8], up[8];
    if constexpr (kIsInterleaved) separate(gate, up, values);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      gate[i] = (kIsInterleaved ? gate[i] : values[i]) + gate_bias[i];
      up[i] = (kIsInterleaved ? up[i] : values[8 + i]) + up_bias[i];
    }
    if (z_gmem != nullptr)
      store_gate_up(z_gmem + static_cast<int64_t>(tile.row + row) * params.n, column, width, is_interleaved, gate, up);
    with_activation(params.activation, [&](auto activate) {
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[i] = activate.forward(gate[i], up[i]);
    });
    store_eight(d_gmem + row * params.d_stride, gate);
  });
}

// Adds a row's partial dots of the warps that are side by side, pairwise, so that the order does not depend on the
// width of a warp's tile. dots_smem: [warps side by side][kBlockM].
template <typename Spec>
__device__ __forceinline__ void store_row_dots(const GemmParams& params, const Tile& tile, ptx::SmemPointer dots_smem) {
  const int row = ptx::thread_index();
  if (row >= tile.rows) return;
  float dots[Spec::kWarpsN];
#pragma unroll
  for (int warp = 0; warp < Spec::kWarpsN; ++warp)
    dots[warp] = ptx::ld_shared_float(dots_smem + (warp * Spec::kBlockM + row) * 4);
#pragma unroll
  for (int width = 1; width < Spec::kWarpsN; width *= 2)
#pragma unroll
    for (int warp = 0; warp < Spec::kWarpsN; warp += 2 * width) dots[warp] += dots[warp + width];
  ptx::st_global_float(params.row_dots + static_cast<int64_t>(tile.column_tile) * params.slots + tile.row + row,
                       dots[0]);
}

// accum: s = dout w2, the gradient of the activation before multiplication by the row's weight.
template <typename Spec>
__device__ __forceinline__ void store_gradient(const GemmParams& params, const Tile& tile,
                                               const Accumulator<Spec>& accum, ptx::SmemPointer staging_smem) {
  using Element = typename Spec::Element;
  using Lanes = LaneColumns<Spec, 8>;
  const int column = tile.column_tile * Spec::kBlockN + Lanes::column();
  const bool has_column = column < params.n;
  const bool is_interleaved = params.is_interleaved != 0;
  const ptx::SmemPointer dots_smem = staging_smem + Spec::kStagingBytes;
  const Element* z_gmem = static_cast<const Element*>(params.preactivation);
  Element* d_gmem = static_cast<Element*>(params.d);
  Element* weighted_gmem = static_cast<Element*>(params.weighted_activation) + column;
  for_each_row<8>(accum, staging_smem, [&](int row, float (&values)[8]) {
    float dot = 0.0f;
    if (has_column && row < tile.rows) {
      const int64_t slot_row = tile.row + row;
      const float weight = ptx::ld_global_float(params.row_weights + slot_row);
      float gate[8], up[8], weighted[8];
      load_gate_up(gate, up, z_gmem + slot_row * (2 * params.n), column, params.n, is_interleaved);
      with_activation(params.activation, [&](auto activate) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const ActivationGradient gradient = activate.backward(gate[i], up[i]);
          dot += gradient.value * values[i];
          weighted[i] = weight * gradient.value;
          gate[i] = weight * values[i] * gradient.by_gate;
          up[i] = weight * values[i] * gradient.by_up;
        }
      });
      store_eight(weighted_gmem + slot_row * params.n, weighted);
      store_gate_up(d_gmem + slot_row * params.d_stride, column, params.n, is_interleaved, gate, up);
    }
#pragma unroll
    for (int lanes = 1; lanes < Lanes::kLanes; lanes *= 2) dot += ptx::shuffle_xor(dot, lanes);
    if (ptx::lane_index() % Lanes::kLanes == 0)
      ptx::st_shared_float(dots_smem + (Spec::warp_column() / Spec::kWarpColumns * Spec::kBlockM + row) * 4, dot);
  });
  ptx::barrier_sync_block();  // read after write: the other warps' partial dots
  store_row_dots<Spec>(params, tile, dots_smem);
}

}  // namespace flashmoe::moe::mma_sync
