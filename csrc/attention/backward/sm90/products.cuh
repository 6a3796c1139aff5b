// Shared by the consumers: the two kinds of product, releases, the store of a gradient.
//
// A thread's accumulator layout (ptx/wgmma.cuh): two rows, r = 0 and 1 (16 * warp + g and that + 8, g = lane / 4), in
// elements 4j + 2r and the next: columns 8j + 2 * (lane % 4) and the next.
#pragma once

#include "attention/backward/sm90/tile_coordinates.cuh"
#include "attention/backward/sm90/schedule.cuh"
#include "attention/backward/sm90/spec.cuh"
#include "device/convert.cuh"
#include "device/named_barriers.cuh"
#include "device/reduce.cuh"
#include "device/warpgroup_product.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/shuffle.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe::attention::backward::sm90 {

// The masking of a block's scores.
//   kPlain     none
//   kMasked    only a range of each row or key is visible
enum class Scores { kPlain, kMasked };

template <typename Spec>
struct Products {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kStreamRows / 2;      // accumulators per thread
  static constexpr int kPacked = Spec::kStreamRows / 4;      // pairs per thread
  static constexpr int kColumns = Spec::kStreamRows / 4;     // distinct columns of a thread's scores
  static constexpr int kOutputs = Spec::kHeadDim / 2;        // of dq and dk
  static constexpr int kValueOutputs = Spec::kValueDim / 2;  // of dv
  static constexpr int kSteps = Spec::kHeadDim / 16;         // of a product whose k is the head dim: scores
  static constexpr int kValueSteps = Spec::kValueDim / 16;   // the same for dP

  template <int kSums>
  static __device__ __forceinline__ void clear(float (&output)[kSums]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) output[i] = 0.0f;
  }

  // Stores output * factor as 16-bit elements. One stmatrix stores the 16 rows of the warp and 16 columns.
  template <typename Tile, int kSums>
  static __device__ __forceinline__ void store_shared(const Tile& tile, const float (&output)[kSums], float factor) {
    static_assert(Tile::kBytes == 64 * 2 * kSums * 2, "64 rows of as many columns");
    const int lane = ptx::recompute(ptx::lane_index());  // no store address lives through the tile's loop
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = tile.smem + row * kSlabRowBytes;
#pragma unroll
    for (int step = 0; step < kSums / 8; ++step) {
      const float* d = &output[8 * step];
      const uint32_t words[4] = {
          pack<Element>(d[0] * factor, d[1] * factor), pack<Element>(d[2] * factor, d[3] * factor),
          pack<Element>(d[4] * factor, d[5] * factor), pack<Element>(d[6] * factor, d[7] * factor)};
      const int chunk = step % 4 * 2 + lane / 16;
      ptx::stmatrix_x4(row_smem + step / 4 * Tile::kSlabBytes + (chunk ^ (row % 8)) * 16, words);
    }
  }

  template <typename Tile, typename Coordinates>
  static __device__ __forceinline__ void store_global(const ptx::TensorMap& map, const Tile& tile, int row,
                                                      const Coordinates& coordinates) {
#pragma unroll
    for (int slab = 0; slab < Tile::kNumSlabs; ++slab) {
      store_box(map, tile.slab(slab), slab * kSlabColumns, row, coordinates);
    }
  }
};

// Compile-time booleans for a generic lambda.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// The prologue of every kernel here: one thread prefetches the maps and initialises the barriers. Returns the warp
// index.
template <typename InitBarriers, typename... Maps>
__device__ __forceinline__ int begin_warp(InitBarriers init, const Maps&... maps) {
  // The shuffle tells the compiler that the role is the same in the whole warp.
  const int warp = ptx::shuffle_index(ptx::warp_index(), 0);
  if (warp == 0 && ptx::elect_one()) {
    (ptx::prefetch_tensor_map(&maps), ...);
    init();
  }
  ptx::barrier_sync_block();
  return warp;
}

// One arrival per warp: its wgmma_wait ensures that its share of the product has read the buffer; the warp barrier
// ensures that every lane has read what it loads itself before the first lane arrives.
__device__ __forceinline__ void release(ptx::Mbarrier* empty) {
  ptx::warp_sync();
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(empty);
}

}  // namespace flashmoe::attention::backward::sm90
