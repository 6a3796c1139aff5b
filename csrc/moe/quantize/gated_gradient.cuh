// moe_gated_gradient: turns the activation's gradient into those of gate and up, as e4m3 operands of the following
// products.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/quantize/tile.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe::moe {

template <typename Element_, int kNumWarps_>
struct GatedGradientSpec : TileQuantizeSpec<Element_, kNumWarps_> {
  using Tile = TileQuantizeSpec<Element_, kNumWarps_>;
  static constexpr int kPartBytes = kScaleBlock * kScaleBlock * 2;  // [8][threads][8 columns] of 16 bits
  static constexpr int kPartsOffset = Tile::kSharedBytes;
  static constexpr int kSharedBytes = kPartsOffset + 2 * kPartBytes;
};

// Where a thread keeps a row of the gradient of up (buffer 0) or of the weighted activation (buffer 1) until the previous
// tile has left the registers.
template <typename Spec>
__device__ __forceinline__ unsigned char* buffer_row(int buffer, int row) {
  return ptx::dynamic_shared_memory() + Spec::kPartsOffset + buffer * Spec::kPartBytes +
         (row * Spec::kNumThreads + ptx::thread_index()) * 16;
}

// Computes the thread's elements of the gradients of gate and up and of the weighted activation; zeros for rows past
// the expert's last.
template <typename Spec>
__device__ __forceinline__ void differentiate(const GatedGradientParams& params, const TileRows& rows, int column,
                                              QuantizedTile<Spec>& gate) {
  using Element = typename Spec::Element;
  constexpr int kLoads = 2;  // rows in flight
  const int lane = ptx::lane_index();
  // Each of 16 lanes has sums of two rows: it keeps one and exchanges the other with the lane `lanes` away.
  const auto halve = [&](float even, float odd, int lanes) {
    const bool keeps_odd = (lane & lanes) != 0;
    return (keeps_odd ? odd : even) + ptx::shuffle_xor(keeps_odd ? even : odd, lanes);
  };
  float dots[4];
  with_activation(params.activation, [&](auto activation) {
#pragma unroll
    for (int start = 0; start < 8; start += kLoads) {
      uint32_t gates[kLoads][4], ups[kLoads][4], slopes[kLoads][4];
      float weights[kLoads], sums[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {  // rows past the last one load the last one
        const int64_t row = rows.first + minimum(gate.group * 8 + start + i, rows.count - 1);
        const auto* z = static_cast<const Element*>(params.preactivation) + row * 2 * params.columns + column;
        ptx::ld_global_128(gates[i], z);
        ptx::ld_global_128(ups[i], z + params.columns);
        ptx::ld_global_128(slopes[i], static_cast<const Element*>(params.s) + row * params.columns + column);
        weights[i] = ptx::ld_global_float(params.row_weights + row);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool is_valid = gate.group * 8 + start + i < rows.count;
        float& dot = sums[i] = 0.0f;
        uint32_t up[4], active[4];
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float2 g = unpack<Element>(gates[i][pair]), u = unpack<Element>(ups[i][pair]);
          const float2 s = unpack<Element>(slopes[i][pair]);
          const ActivationGradient first = activation.backward(g.x, u.x), second = activation.backward(g.y, u.y);
          const float weighted[2] = {weights[i] * s.x, weights[i] * s.y};
          const auto valid = [&](float low, float high) { return is_valid ? pack<Element>(low, high) : 0; };
          gate.words[start + i][pair] = valid(weighted[0] * first.by_gate, weighted[1] * second.by_gate);
          up[pair] = valid(weighted[0] * first.by_up, weighted[1] * second.by_up);
          active[pair] = valid(weights[i] * first.value, weights[i] * second.value);
          dot = ptx::fma_rn(first.value, s.x, dot);
          dot = ptx::fma_rn(second.value, s.y, dot);
        }
        ptx::st_shared_128(buffer_row<Spec>(0, start + i), up);
        ptx::st_shared_128(buffer_row<Spec>(1, start + i), active);
      }
      dots[start / 2] = halve(sums[0], sums[1], 8);
    }
  });
  if (params.row_dots == nullptr) return;
  const float both = halve(halve(dots[0], dots[1], 4), halve(dots[2], dots[3], 4), 2);
  const float dot = both + ptx::shuffle_xor(both, 1);
  const int row = gate.group * 8 + lane / 8 % 2 + lane / 4 % 2 * 2 + lane / 2 % 2 * 4;
  if (row < rows.count && lane % 2 == 0) {
    ptx::st_global_float(params.row_dots + static_cast<int64_t>(column / kScaleBlock) * params.slots + rows.first + row,
                         dot);
  }
}

template <typename Spec>
__device__ __forceinline__ void gated_gradient(const GatedGradientParams& params) {
  ptx::grid_launch_dependents();
  // Hazard: the previous product may still write s.
  ptx::grid_dependency_wait();
  const int column_blocks = params.columns / kScaleBlock;
  const int column_block = ptx::block_index() % column_blocks;
  const TileRows rows = rows_of_block(params.expert_offsets, params.experts, ptx::block_index() / column_blocks);
  if (rows.count == 0) return;
  QuantizedTile<Spec> tile;
  differentiate(params, rows, column_block * kScaleBlock + tile.chunk * 8, tile);
  const auto load_buffer = [&](int buffer) {
#pragma unroll
    for (int i = 0; i < 8; ++i) ptx::ld_shared_128(tile.words[i], buffer_row<Spec>(buffer, i));
  };
  const int64_t first = rows.first, columns = 2 * params.columns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1) load_buffer(0);
    const int column = column_block * kScaleBlock + half * params.columns;
    if (params.values != nullptr) {
      tile.store_rows(static_cast<unsigned char*>(params.values) + first * columns + column, columns,
                      params.scales + first * 2 * column_blocks + column / kScaleBlock, 2 * column_blocks, rows.count);
    }
    if (params.transposed != nullptr) {
      tile.store_transposed_columns(
          static_cast<unsigned char*>(params.transposed) + column * params.transposed_stride + rows.block * kScaleBlock,
          params.transposed_stride, params.transposed_scales + rows.block * columns + column);
    }
  }
  if (params.activation_transposed == nullptr) return;
  load_buffer(1);
  const BlockScale scale =
      tile.store_transposed_tile(static_cast<unsigned char*>(params.activation_transposed) +
                                     column_block * kScaleBlock * params.transposed_stride + rows.block * kScaleBlock,
                                 params.transposed_stride);
  if (ptx::thread_index() == 0) {
    ptx::st_global_float(params.activation_scales + static_cast<int64_t>(rows.block) * column_blocks + column_block,
                         scale.scale);
  }
}

}  // namespace flashmoe::moe
