// From accumulators to rows of d: bias, activation, rounding, 16-byte stores. A lane's accumulators are single columns
// of two rows, so each warp passes them through its part of shared memory, as floats [kBlockM, 16 * kFragments].
#pragma once

#include "moe/eight_elements.cuh"
#include "moe/grouped_gemm/activation.cuh"
#include "moe/grouped_gemm/few_rows/multiply.cuh"
#include "moe/grouped_gemm/few_rows/tiles.cuh"
#include "moe/grouped_gemm/weights.cuh"
#include "moe/params/gemm.h"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::moe::few_rows {

// A warp's sums in shared memory. The pitch puts a store's lanes on 32 different banks.
template <typename Spec>
struct WarpSums {
  static constexpr int kPitchBytes = (16 * Spec::kFragments + 4) * 4;
  static constexpr int kBytes = Spec::kBlockM * kPitchBytes;
  static_assert(Spec::kNumWarps * kBytes <= Spec::kNumStages * Spec::kStageBytes,
                "the ring's bytes have room for them");

  const ptx::SmemPointer sums_smem;

  __device__ __forceinline__ WarpSums(ptx::SmemPointer ring_smem, const Accumulator<Spec>& accumulator)
      : sums_smem(ring_smem + ptx::warp_index() * kBytes) {
    const int lane = ptx::lane_index();
    const ptx::SmemPointer lane_smem = sums_smem + (lane % 4 * 2 * kPitchBytes + lane / 4 * 4);
#pragma unroll
    for (int i = 0; i < Spec::kFragments; ++i)
#pragma unroll
      for (int group = 0; group < Spec::kGroups; ++group)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          ptx::st_shared_float(lane_smem + ((8 * group + j % 2) * kPitchBytes + (16 * i + j / 2 * 8) * 4),
                               accumulator[i][group][j]);
    ptx::warp_sync();  // all lanes' sums are written
  }

  // Loads eight columns of a row.
  __device__ __forceinline__ void get(float (&sums)[8], int row, int column) const {
    const ptx::SmemPointer row_smem = sums_smem + (row * kPitchBytes + column * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 four = ptx::ld_shared_float4(row_smem + 16 * half);
      sums[4 * half] = four.x;
      sums[4 * half + 1] = four.y;
      sums[4 * half + 2] = four.z;
      sums[4 * half + 3] = four.w;
    }
  }
};

// Adds eight 16-bit numbers.
template <typename Element>
__device__ __forceinline__ void add_eight(float (&sums)[8], const Element* gmem) {
  uint32_t words[4];
  ptx::ld_global_128(words, gmem);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<Element>(words[i]);
    sums[2 * i] += pair.x;
    sums[2 * i + 1] += pair.y;
  }
}

template <typename Element>
__device__ __forceinline__ const Element* bias_of(const GemmParams& params, int expert) {
  return static_cast<const Element*>(params.bias) + static_cast<int64_t>(expert) * params.n;
}

template <typename Spec>
__device__ __forceinline__ void store_plain(const GemmParams& params, const Tile& tile,
                                            const WarpSums<Spec>& warp_sums) {
  using Element = typename Spec::Element;
  constexpr int kChunks = 2 * Spec::kFragments;  // per row, 8 columns each
  for (int item = ptx::lane_index(); item < tile.rows * kChunks; item += 32) {
    const int row = item / kChunks;
    const int within = item % kChunks * 8;
    const int column = tile.column + ptx::warp_index() * (16 * Spec::kFragments) + within;
    if (column >= params.n) continue;
    float sums[8];
    warp_sums.get(sums, row, within);
    if (params.bias != nullptr) add_eight<Element>(sums, bias_of<Element>(params, tile.expert) + column);
    store_eight<Element>(static_cast<Element*>(params.d) + (tile.row + row) * params.d_stride + column, sums);
  }
}

// Eight gates and eight ups to interleaved pairs; separate() does the reverse.
__device__ __forceinline__ void interleave(float (&pairs)[2][8], const float (&halves)[2][8]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) pairs[i / 8][i % 8] = halves[i % 2][i / 2];
}

__device__ __forceinline__ void separate(float (&halves)[2][8], const float (&pairs)[2][8]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) halves[i % 2][i / 2] = pairs[i / 8][i % 8];
}

// z in the order of the weights' rows: adds the bias and stores z if requested. `column`: that of z[0]; z[1] is
// `distance` further on.
template <typename Element>
__device__ __forceinline__ void finish_preactivation(float (&z)[2][8], const GemmParams& params, int expert,
                                                     int64_t row, int column, int distance) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int z_column = column + half * distance;
    if (params.bias != nullptr) add_eight<Element>(z[half], bias_of<Element>(params, expert) + z_column);
    if (params.preactivation != nullptr)
      store_eight<Element>(static_cast<Element*>(params.preactivation) + row * params.n + z_column, z[half]);
  }
}

template <typename Spec, Weights kWeights, typename Act>
__device__ __forceinline__ void store_gated(const GemmParams& params, const Tile& tile, const WarpSums<Spec>& warp_sums,
                                            Act) {
  using Element = typename Spec::Element;
  for (int item = ptx::lane_index(); item < tile.rows * Spec::kFragments; item += 32) {
    const int fragment = item % Spec::kFragments;
    const int column = tile.column / 2 + (ptx::warp_index() * Spec::kFragments + fragment) * 8;  // of d
    if (column >= params.n / 2) continue;
    const int64_t row = tile.row + item / Spec::kFragments;
    float pairs[2][8];
    float halves[2][8];
#pragma unroll
    for (int half = 0; half < 2; ++half)
      warp_sums.get(kWeights == Weights::kKnPairs ? pairs[half] : halves[half], item / Spec::kFragments,
                    16 * fragment + 8 * half);
    if (kWeights == Weights::kKnPairs || (kWeights == Weights::kNk && params.is_interleaved != 0)) {
      if constexpr (kWeights == Weights::kNk) interleave(pairs, halves);
      finish_preactivation<Element>(pairs, params, tile.expert, row, 2 * column, 8);
      separate(halves, pairs);
    } else {
      finish_preactivation<Element>(halves, params, tile.expert, row, column, params.n / 2);
    }
    float h[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) h[i] = Act::forward(halves[0][i], halves[1][i]);
    store_eight<Element>(static_cast<Element*>(params.d) + row * params.d_stride + column, h);
  }
}

}  // namespace flashmoe::moe::few_rows
