// moe_quantize_tiles: converts 16-bit weights, tokens or their gradients to e4m3 operands of products and, transposed,
// of weight gradients.
#pragma once

#include "device/math.cuh"
#include "moe/quantize/tile.cuh"
#include "ptx/grid_dependency.cuh"

namespace flashmoe::moe {

template <typename Spec>
__device__ __forceinline__ void quantize_weights(const QuantizeTilesParams& params) {
  const int column_blocks = params.columns / kScaleBlock, row_blocks = params.rows / kScaleBlock;
  const int index = ptx::block_index();
  const int column_block = index % column_blocks;
  const int row_block = index / column_blocks % row_blocks;
  const int64_t expert = index / column_blocks / row_blocks;
  QuantizedTile<Spec> tile;
  const int64_t weights = static_cast<int64_t>(params.rows) * params.columns;  // per expert
  const int64_t first = expert * weights + static_cast<int64_t>(row_block) * kScaleBlock * params.columns +
                        column_block * kScaleBlock;  // of the tile
  const auto* x = static_cast<const typename Spec::Element*>(params.x) + first + tile.chunk * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    ptx::ld_global_128(tile.words[i], x + static_cast<int64_t>(tile.group * 8 + i) * params.columns);
  }
  auto* transposed = static_cast<unsigned char*>(params.transposed) + expert * weights;
  const BlockScale scale = tile.store_tile(
      static_cast<unsigned char*>(params.values) + first, params.columns,
      transposed + static_cast<int64_t>(column_block) * kScaleBlock * params.rows + row_block * kScaleBlock,
      params.rows);
  if (ptx::thread_index() == 0) {
    const int64_t blocks = expert * row_blocks * column_blocks;
    ptx::st_global_float(params.scales + blocks + row_block * column_blocks + column_block, scale.scale);
    ptx::st_global_float(params.transposed_scales + blocks + column_block * row_blocks + row_block, scale.scale);
  }
}

template <typename Spec, TileSource kSource>
__device__ __forceinline__ void quantize_tiles(const QuantizeTilesParams& params) {
  ptx::grid_launch_dependents();
  // Hazard: the previous grid may still write x or row_slots, or read what these results overwrite.
  ptx::grid_dependency_wait();
  if constexpr (kSource == TileSource::kWeights) {
    quantize_weights<Spec>(params);
  } else {
    const int column_blocks = params.columns / kScaleBlock;
    const int column_block = ptx::block_index() % column_blocks;
    const TileRows rows = rows_of_block(params.expert_offsets, params.experts, ptx::block_index() / column_blocks);
    if (rows.count == 0) return;
    const int column = column_block * kScaleBlock;
    QuantizedTile<Spec> tile;
    const int lane_row =
        minimum(tile.group * 8 + ptx::lane_index() % 8, rows.count - 1);  // rows past the last one load the last one
    const int token = static_cast<int>(ptx::ld_global_32(params.row_slots + rows.first + lane_row)) / params.top_k;
    const auto* x = static_cast<const typename Spec::Element*>(params.x) + column + tile.chunk * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      ptx::ld_global_128(tile.words[i], x + ptx::shuffle_index(token, (ptx::lane_index() & 16) + i) * params.x_stride);
    }
    if (rows.count < kScaleBlock) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (tile.group * 8 + i < rows.count) continue;
        tile.words[i][0] = tile.words[i][1] = tile.words[i][2] = tile.words[i][3] = 0;
      }
    }
    auto* transposed =
        static_cast<unsigned char*>(params.transposed) + column * params.transposed_stride + rows.block * kScaleBlock;
    if constexpr (kSource == TileSource::kTokens) {
      const BlockScale scale = tile.store_transposed_tile(transposed, params.transposed_stride);
      if (ptx::thread_index() == 0) {
        ptx::st_global_float(params.transposed_scales + static_cast<int64_t>(rows.block) * column_blocks + column_block,
                             scale.scale);
      }
    } else {
      const int64_t first = rows.first;
      if (params.values != nullptr) {
        tile.store_rows(static_cast<unsigned char*>(params.values) + first * params.columns + column, params.columns,
                        params.scales + first * column_blocks + column_block, column_blocks, rows.count);
      }
      if (params.transposed != nullptr) {
        tile.store_transposed_columns(
            transposed, params.transposed_stride,
            params.transposed_scales + static_cast<int64_t>(rows.block) * params.columns + column);
      }
    }
  }
}

}  // namespace flashmoe::moe
