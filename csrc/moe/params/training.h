// What the host passes to the kernels that train a layer in e4m3, beside scaled.h's. Plain C types only, as in gemm.h, which says what
// slots and rows are.
//
// A weight gradient sums over an expert's rows, and tensor cores take 8-bit operands with neighbours along the sum alone: both operands
// are written transposed. There an expert's rows fill whole blocks of 128, with zeros behind the last; its first block is
// padded_block() below, which needs no list of what came before. The "padded" rows are 128 times padded_blocks().
#pragma once

#include "moe/params/scaled.h"

namespace flashmoe::moe {

// Of the expert whose rows begin at `first_row`. Experts never share a block: between two there is at most one that nobody uses.
constexpr int padded_block(int first_row, int expert) { return first_row / kScaleBlock + expert; }
constexpr int64_t padded_blocks(int64_t slots, int64_t experts) { return slots / kScaleBlock + experts; }

// Words of the axis `source` of moe_quantize_tiles, in its order.
enum class TileSource : int32_t { kWeights, kTokens, kGradients };

// moe_quantize_tiles: e4m3 values and their transpose, of tiles of 128 by 128; a scale is a largest magnitude / 448, as moe_quantize's.
//
//   weights     x [experts, rows, columns]: values [experts, rows, columns] with scales [experts, rows / 128, columns / 128],
//               transposed [experts, columns, rows] with transposed_scales [experts, columns / 128, rows / 128]; one scale a tile
//   tokens      x[token(row)]: transposed [columns, padded] with transposed_scales [padded blocks, columns / 128]; one scale a tile
//   gradients   x[token(row)]: values [slots, columns] with scales [slots, columns / 128], one for 128 of a row;
//               transposed with transposed_scales [padded blocks, columns], one for 128 rows of a column
//
// Grid: the tiles, those of neighbouring columns first. What is null is not wanted.
struct QuantizeTilesParams {
  const void* x;
  void* values;
  float* scales;
  void* transposed;
  float* transposed_scales;
  const int32_t* expert_offsets;  // [experts + 1]; not of weights
  const int32_t* row_slots;       // [slots]; not of weights
  int64_t x_stride;               // elements from a row to the next
  int64_t transposed_stride;      // values from a column to the next: rows, or padded rows
  int32_t experts;
  int32_t top_k;
  int32_t rows;  // of weights
  int32_t columns;
};

// moe_gated_gradient: what stands between the backward pass's products, of s = dout W2: with the activation recomputed from z,
//
//   dz = gradient of z for the gradient row_weights[row] * s of the activation: as `gradients` above, 2 * columns of them
//   row_weights[row] * activation(z): as `tokens` above
//   row_dots[tile][row] = sum over 128 columns of activation(z) * s
//
// dz and the weighted activation are rounded to the 16-bit type first. Grid: padded blocks times columns / 128.
struct GatedGradientParams {
  const void* preactivation;  // [slots, 2 * columns], gate first
  const void* s;              // [slots, columns]
  const float* row_weights;   // [slots]
  const int32_t* expert_offsets;
  void* values;
  float* scales;
  void* transposed;
  float* transposed_scales;
  void* activation_transposed;  // [columns, padded]
  float* activation_scales;     // [padded blocks, columns / 128]
  float* row_dots;              // [columns / 128][slots]
  int64_t transposed_stride;
  int32_t experts;
  int32_t slots;
  int32_t columns;
  Activation activation;
};

}  // namespace flashmoe::moe
