// Parameters that the host passes to linear's own kernels. Plain C types only, as in moe/params/gemm.h.
//
// The sum over k is divided into `segments` of whole blocks of 64 k; segment s starts at block s * blocks / segments.
// Each segment is one chain of products of 16 k in ascending order, and the segments are added in ascending order, in
// float32. Their number depends only on n and k, so a row's bits are the same whichever tile it is in, and whether one
// block computes all segments of the tile or each has its own block.
#pragma once

#include "moe/params/gemm.h"

namespace flashmoe::linear {

using moe::Activation;
using moe::GemmParams;

// Segments of a sum that is divided.
constexpr int kSegments = 4;

struct LinearParams {
  GemmParams gemm;  // for one expert, without offsets and without a tile counter
  // Null: a block computes all segments of its tile. Otherwise each block computes one segment, and these are the sums
  // of each: [tiles][consumers][segments][sums of a thread / 4][128 threads][4].
  float* partials;
  int32_t* arrivals;  // with partials: [tiles][consumers] zeros, and zeros again at the end
  int32_t segments;   // kSegments, or 1
};

}  // namespace flashmoe::linear
