// moe_gated_gradient: from the activation's gradient to that of gate and up, as e4m3 operands of the products that follow.
#pragma once

#include "device/math.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/quantize/tile.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe {
namespace moe {

// The thread's part of the gradients of gate and up and of the weighted activation; of rows past the expert's last, zeros.
template <typename Spec>
__device__ __forceinline__ void differentiate(const GatedGradientParams& params, const TileRows& at, int column,
                                              QuantizedTile<Spec>& gate, QuantizedTile<Spec>& up,
                                              QuantizedTile<Spec>& active) {
  using Element = typename Spec::Element;
  constexpr int kLoads = 4;  // rows in flight
  float dots[8];
  with_activation(params.activation, [&](auto activation) {
#pragma unroll
    for (int start = 0; start < 8; start += kLoads) {
      uint32_t gates[kLoads][4], ups[kLoads][4], slopes[kLoads][4];
      float weights[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {  // a row that is none loads the last one
        const int64_t row = at.first + minimum(gate.group * 8 + start + i, at.count - 1);
        const auto* z = static_cast<const Element*>(params.preactivation) + row * 2 * params.columns + column;
        ptx::ld_global_128(gates[i], z);
        ptx::ld_global_128(ups[i], z + params.columns);
        ptx::ld_global_128(slopes[i], static_cast<const Element*>(params.s) + row * params.columns + column);
        weights[i] = ptx::ld_global_float(params.row_weights + row);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const bool is_valid = gate.group * 8 + start + i < at.count;
        float dot = 0.0f;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          const float2 g = unpack<Element>(gates[i][pair]), u = unpack<Element>(ups[i][pair]);
          const float2 s = unpack<Element>(slopes[i][pair]);
          const ActivationGradient first = activation.backward(g.x, u.x), second = activation.backward(g.y, u.y);
          const float weighted[2] = {weights[i] * s.x, weights[i] * s.y};
          const auto store = [&](QuantizedTile<Spec>& tile, float low, float high) {
            tile.words[start + i][pair] = is_valid ? pack<Element>(low, high) : 0;
          };
          store(gate, weighted[0] * first.by_gate, weighted[1] * second.by_gate);
          store(up, weighted[0] * first.by_up, weighted[1] * second.by_up);
          store(active, weights[i] * first.value, weights[i] * second.value);
          dot = ptx::fma_rn(first.value, s.x, dot);
          dot = ptx::fma_rn(second.value, s.y, dot);
        }
        dots[start + i] = dot;
      }
    }
  });
  if (params.row_dots == nullptr) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float dot = dots[i];
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) dot += ptx::shuffle_xor(dot, lanes);  // the row's 16 lanes
    const int row = gate.group * 8 + i;
    if (row < at.count && gate.chunk == 0) {
      ptx::st_global_float(params.row_dots + static_cast<int64_t>(column / kScaleBlock) * params.slots + at.first + row,
                           dot);
    }
  }
}

template <typename Spec>
__device__ __forceinline__ void gated_gradient(const GatedGradientParams& params) {
  ptx::grid_launch_dependents();
  // Hazard: the product in front may still write s.
  ptx::grid_dependency_wait();
  const int column_blocks = params.columns / kScaleBlock;
  const int column_block = ptx::block_index() % column_blocks;
  const TileRows at = rows_of_block(params.expert_offsets, params.experts, ptx::block_index() / column_blocks);
  if (at.count == 0) return;
  QuantizedTile<Spec> gate, up, active;
  differentiate(params, at, column_block * kScaleBlock + gate.chunk * 8, gate, up, active);
  const int64_t first = at.first, columns = 2 * params.columns;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const QuantizedTile<Spec>& tile = half == 0 ? gate : up;
    const int column = column_block * kScaleBlock + half * params.columns;
    if (params.values != nullptr) {
      tile.store_rows(static_cast<unsigned char*>(params.values) + first * columns + column, columns,
                      params.scales + first * 2 * column_blocks + column / kScaleBlock, 2 * column_blocks, at.count);
    }
    if (params.transposed != nullptr) {
      tile.store_transposed_columns(
          static_cast<unsigned char*>(params.transposed) + column * params.transposed_stride + at.block * kScaleBlock,
          params.transposed_stride, params.transposed_scales + at.block * columns + column);
    }
  }
  if (params.activation_transposed == nullptr) return;
  const BlockScale scale =
      active.store_transposed_tile(static_cast<unsigned char*>(params.activation_transposed) +
                                       column_block * kScaleBlock * params.transposed_stride + at.block * kScaleBlock,
                                   params.transposed_stride);
  if (ptx::thread_index() == 0) {
    ptx::st_global_float(params.activation_scales + static_cast<int64_t>(at.block) * column_blocks + column_block,
                         scale.scale);
  }
}

}  // namespace moe
}  // namespace flashmoe
