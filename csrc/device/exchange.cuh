// Transposes words that the lanes of a quad hold in columns into rows, for wider stores.
#pragma once

#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {

// Two lanes that differ in lane_bit transpose their 2 x 2 words: afterwards the lane without the bit has the partner's
// `low` as its `high`, the other lane the partner's `high` as its `low`.
__device__ __forceinline__ void exchange(uint32_t& low, uint32_t& high, int lane_bit) {
  const bool has_bit = (ptx::lane_index() & lane_bit) != 0;
  const uint32_t received = ptx::shuffle_xor(has_bit ? low : high, lane_bit);
  low = has_bit ? received : low;
  high = has_bit ? high : received;
}

// v[i] of lane t of a quad becomes v[t] of lane i.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&v)[4]) {
  exchange(v[0], v[1], 1);
  exchange(v[2], v[3], 1);
  exchange(v[0], v[2], 2);
  exchange(v[1], v[3], 2);
}

}  // namespace flashmoe
