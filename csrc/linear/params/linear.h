// What the host passes to the kernels of linear that are no grouped products as they stand. Plain C types only, as in moe/params/gemm.h.
//
// The sum over k is cut into `segments` of whole blocks of 64 k, segment s from block s * blocks / segments on. Each is one chain of products
// of 16 k in ascending order, and they are added in ascending order, in float32: how many there are is a matter of n and k alone, so a row's
// bits are the same whichever tile it is in, and whether one block computes all segments of the tile or each has a block of its own.
#pragma once

#include "moe/params/gemm.h"

namespace flashmoe::linear {

using moe::Activation;
using moe::GemmParams;

// Of a sum that is divided.
constexpr int kSegments = 4;

struct LinearParams {
  GemmParams gemm;  // of one expert without offsets and without a counter of tiles
  // Null: a block computes all segments of its tile. Else a segment is a block's, and these are the sums of each:
  // [tiles][consumers][segments][sums of a thread / 4][128 threads][4].
  float* partials;
  int32_t* arrivals;  // with partials: [tiles][consumers] zeros, and zeros again at the end
  int32_t segments;   // kSegments, or 1
};

}  // namespace flashmoe::linear
