// Passes a warp's sums to the epilogue: 16 rows at a time through shared memory, so that a lane gets neighbouring
// columns of one row and accesses 16 bytes of global memory at once, and so that the epilogue's code exists once
// instead of once per register.
#pragma once

#include "moe/eight_elements.cuh"
#include "moe/grouped_gemm/mma_sync/multiply.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::moe::mma_sync {

// Each lane holds kColumns columns of one row of the tile; says which lanes of the warp share a row.
template <typename Spec, int kColumns>
struct LaneColumns {
  static constexpr int kLanes = Spec::kWarpColumns / kColumns;  // per row
  static constexpr int kRows = 32 / kLanes;                     // of the warp at a time
  static constexpr int kPasses = 16 / kRows;
  static_assert(kPasses * kRows == 16, "passes end with the 16 rows");

  static __device__ __forceinline__ int row() { return ptx::lane_index() / kLanes; }
  static __device__ __forceinline__ int column() {  // in the tile
    return Spec::warp_column() + ptx::lane_index() % kLanes * kColumns;
  }
};

// Calls visit(row of the tile, its sums in the lane's kColumns columns). staging_smem: that of the block, free. Every
// lane calls visit.
template <int kColumns, typename Spec, typename Visit>
__device__ __forceinline__ void for_each_row(const Accumulator<Spec>& accum, ptx::SmemPointer staging_smem,
                                             Visit visit) {
  using Lanes = LaneColumns<Spec, kColumns>;
  const int lane = ptx::lane_index();
  const ptx::SmemPointer warp_smem = staging_smem + ptx::warp_index() * Spec::kWarpStagingBytes;
#pragma unroll 1
  for (int m = 0; m < Spec::kMmaM; ++m) {
    ptx::warp_sync();  // write after read: the previous 16 rows
#pragma unroll
    for (int known = 0; known < Spec::kMmaM; ++known) {
      if (known != m) continue;  // register indices must be compile-time constants
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t pair[2] = {ptx::float_bits(accum.d[known][n][2 * half]),
                                    ptx::float_bits(accum.d[known][n][2 * half + 1])};
          const int offset = (half * 8 + lane / 4) * Spec::kStagingRowBytes + (n * 8 + lane % 4 * 2) * 4;
          ptx::st_shared_64(warp_smem + offset, pair);
        }
    }
    ptx::warp_sync();  // read after write: four lanes wrote each row
#pragma unroll 1
    for (int pass = 0; pass < Lanes::kPasses; ++pass) {
      const int row = pass * Lanes::kRows + Lanes::row();
      const ptx::SmemPointer row_smem =
          warp_smem + row * Spec::kStagingRowBytes + lane % Lanes::kLanes * (kColumns * 4);
      float values[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; i += 4) {
        const float4 four = ptx::ld_shared_float4(row_smem + i * 4);
        values[i] = four.x;
        values[i + 1] = four.y;
        values[i + 2] = four.z;
        values[i + 3] = four.w;
      }
      visit(Spec::warp_row() + m * 16 + row, values);
    }
  }
}

// Eight gates and eight ups to pairs (gate, up); separate() does the reverse.
__device__ __forceinline__ void interleave(float (&pairs)[16], const float (&gate)[8], const float (&up)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = gate[i];
    pairs[2 * i + 1] = up[i];
  }
}

__device__ __forceinline__ void separate(float (&gate)[8], float (&up)[8], const float (&pairs)[16]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    gate[i] = pairs[2 * i];
    up[i] = pairs[2 * i + 1];
  }
}

// Stores eight of gate and of up at column `column` of a row of both, [2 * width], in either layout.
template <typename Element>
__device__ __forceinline__ void store_gate_up(Element* row_gmem, int column, int width, bool is_interleaved,
                                              const float (&gate)[8], const float (&up)[8]) {
  if (is_interleaved) {
    float pairs[16];
    interleave(pairs, gate, up);
    store_eight(row_gmem + 2 * column, pairs);
    store_eight(row_gmem + 2 * column + 8, pairs + 8);
  } else {
    store_eight(row_gmem + column, gate);
    store_eight(row_gmem + width + column, up);
  }
}

template <typename Element>
__device__ __forceinline__ void load_gate_up(float (&gate)[8], float (&up)[8], const Element* row_gmem, int column,
                                             int width, bool is_interleaved) {
  if (is_interleaved) {
    float pairs[16];
    load_eight(pairs, row_gmem + 2 * column);
    load_eight(pairs + 8, row_gmem + 2 * column + 8);
    separate(gate, up, pairs);
  } else {
    load_eight(gate, row_gmem + column);
    load_eight(up, row_gmem + width + column);
  }
}

}  // namespace flashmoe::moe::mma_sync
