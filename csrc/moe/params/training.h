// Parameters that the host passes to the kernels that train a layer in e4m3, in addition to scaled.h's. Plain C types
// only, as in gemm.h, which defines slots and rows.
//
// A weight gradient sums over an expert's rows, and tensor cores need 8-bit operands that are contiguous along the sum,
// so both operands are written transposed. In them an expert's rows fill whole blocks of 128, with zeros after the last
// row; padded_block() below computes an expert's first block without a list of the experts before it. There are 128 *
// padded_blocks() "padded" rows.
#pragma once

#include "moe/params/scaled.h"

namespace flashmoe::moe {

// The first block of the expert whose rows begin at `first_row`. Experts never share a block; between two there is at
// most one unused block.
constexpr int padded_block(int first_row, int expert) { return first_row / kScaleBlock + expert; }
constexpr int64_t padded_blocks(int64_t slots, int64_t experts) { return slots / kScaleBlock + experts; }

// The words of the axis `source` of moe_quantize_tiles, in its order.
enum class TileSource : int32_t { kWeights, kTokens, kGradients };

// moe_quantize_tiles: e4m3 values and their transpose, in tiles of 128 by 128; a scale is the largest magnitude / 448,
// as in moe_quantize.
//
//   weights     x [experts, rows, columns]: values [experts, rows, columns] with scales [experts, rows / 128,
//               columns / 128], transposed [experts, columns, rows] with transposed_scales [experts, columns / 128,
//               rows / 128]; one scale per tile
//   tokens      x[token(row)]: transposed [columns, padded] with transposed_scales [padded blocks, columns / 128];
//               one scale per tile
//   gradients   x[token(row)]: values [slots, columns] with scales [slots, columns / 128], one per 128 values of a row;
//               transposed with transposed_scales [padded blocks, columns], one per 128 rows of a column
//
// Grid: one block per tile, neighbouring columns first. Null outputs are not written.
struct QuantizeTilesParams {
  const void* x;
  void* values;
  float* scales;
  void* transposed;
  float* transposed_scales;
  const int32_t* expert_offsets;  // [experts + 1]; not for weights
  const int32_t* row_slots;       // [slots]; not for weights
  int64_t x_stride;               // elements from one row to the next
  int64_t transposed_stride;      // values from one column to the next: rows, or padded rows
  int32_t experts;
  int32_t top_k;
  int32_t rows;  // for weights
  int32_t columns;
};

// moe_gated_gradient: the step between the backward pass's products. With s = dout W2 and the activation recomputed
// from z:
//
//   dz = gradient with respect to z, given the activation's gradient row_weights[row] * s: as
//        `gradients` above, with 2 * columns columns
//   row_weights[row] * activation(z): as `tokens` above
//   row_dots[tile][row] = sum over 128 columns of activation(z) * s
//
// dz and the weighted activation are first rounded to the 16-bit type. Grid: padded blocks * columns / 128.
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
