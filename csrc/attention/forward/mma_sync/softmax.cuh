// Online softmax over the m16n8 accumulator layout: in each 16-row block a thread holds rows g = lane / 4 and g + 8
// (elements 0, 1 and 2, 3 of each 8-column block); the four lanes of a quad share a row.
#pragma once

#include "attention/softmax.cuh"
#include "ptx/math.cuh"

namespace flashmoe {

namespace attention::mma_sync {

// Running state of one row: the unscaled score that the exponentials refer to (equal in the quad;
// attention/softmax.cuh) and this thread's share of the sum of exponentials (added over the quad once, at the end).
struct RowState {
  float max;
  float sum;

  __device__ __forceinline__ RowState() : max(ptx::negative_infinity()), sum(0.0f) {}
};

}  // namespace attention::mma_sync
}  // namespace flashmoe
