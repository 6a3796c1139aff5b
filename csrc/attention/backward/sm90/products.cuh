// What the consumers share: the two kinds of product, releases, the store of a gradient.
//
// Layouts of a thread (ptx/wgmma.cuh): two rows, r = 0 and 1 (16 * warp + g and that + 8, g = lane / 4), in elements
// 4j + 2r and the next: columns 8j + 2 * (lane % 4) and the next.
#pragma once

#include "attention/backward/sm90/tile_coordinates.cuh"
#include "attention/backward/sm90/schedule.cuh"
#include "attention/backward/sm90/spec.cuh"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace sm90 {

// Joins the 128 threads of one consumer warpgroup. Named barrier 0 is the block's.
__device__ __forceinline__ void sync_consumer(int consumer) { ptx::named_barrier_sync(1 + consumer, 128); }

// What a block's scores go through.
//   kPlain     all of them count
//   kMasked    a range of each row's or key's does
enum class Scores { kPlain, kMasked };

template <typename Spec>
struct Products {
  using Element = typename Spec::Element;
  static constexpr int kScores = Spec::kStreamRows / 2;   // accumulators per thread
  static constexpr int kPacked = Spec::kStreamRows / 4;   // pairs per thread
  static constexpr int kColumns = Spec::kStreamRows / 4;  // distinct columns of a thread's scores
  static constexpr int kOutputs = Spec::kHeadDim / 2;

  // scores[64 x kStreamRows] (+)= own[64 x kHeadDim] stream[kStreamRows x kHeadDim]^T; asynchronous. Adds if kAdds.
  template <bool kAdds>
  static __device__ __forceinline__ void issue_scores(float (&scores)[kScores], const unsigned char* own_smem,
                                                      const unsigned char* stream_smem) {
    const uint64_t own = ptx::make_smem_descriptor(own_smem, 0, 1024);
    const uint64_t stream = ptx::make_smem_descriptor(stream_smem, 0, 1024);
    if constexpr (kAdds) ptx::wgmma_fence_operands(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kHeadDim / 16; ++step) {
      const int slab = step / 4;
      const int in_row = step % 4 * 32;
      ptx::wgmma_ss<Element, Spec::kStreamRows, false>(
          scores, ptx::advance_smem_descriptor(own, slab * Spec::kOwnSlabBytes + in_row),
          ptx::advance_smem_descriptor(stream, slab * Spec::kStreamSlabBytes + in_row), step == 0 && !kAdds ? 0 : 1);
    }
    ptx::wgmma_commit();
  }

  // output[64 x kHeadDim] += a[64 x kStreamRows] stream[kStreamRows x kHeadDim]; asynchronous.
  static __device__ __forceinline__ void issue_output(float (&output)[kOutputs], uint32_t (&packed)[kPacked],
                                                      const unsigned char* stream_smem) {
    issue_output(output, packed, ptx::make_smem_descriptor(stream_smem, Spec::kStreamSlabBytes, 1024));
  }
  static __device__ __forceinline__ void issue_output(float (&output)[kOutputs], uint32_t (&packed)[kPacked],
                                                      uint64_t stream) {
    ptx::wgmma_fence_operands(output);
    ptx::wgmma_fence_operands(packed);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Spec::kStreamRows / 16; ++step) {
      const uint32_t* a = &packed[4 * step];
      ptx::wgmma_rs<Element, Spec::kHeadDim, true>(output, a[0], a[1], a[2], a[3],
                                                   ptx::advance_smem_descriptor(stream, step * 16 * 128), 1);
    }
    ptx::wgmma_commit();
  }

  // The accumulator layout is the operand layout: k-step j takes column blocks 2j and 2j + 1.
  static __device__ __forceinline__ void pack_scores(uint32_t (&packed)[kPacked], const float (&scores)[kScores]) {
#pragma unroll
    for (int i = 0; i < kPacked; ++i) packed[i] = pack<Element>(scores[2 * i], scores[2 * i + 1]);
  }

  static __device__ __forceinline__ void clear(float (&output)[kOutputs]) {
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) output[i] = 0.0f;
  }

  // output * factor as 16-bit elements into [kNumSlabs][64 rows][64 columns], 128-byte swizzle: 16-byte chunk c of row r
  // is stored at c ^ (r % 8). One stmatrix stores the 16 rows of the warp and 16 columns.
  static __device__ __forceinline__ void store_shared(unsigned char* smem, const float (&output)[kOutputs],
                                                      float factor) {
    const int lane = ptx::recompute(ptx::lane_index());  // no store address lives through the tile's loop
    const int row = ptx::warp_index() % 4 * 16 + lane % 16;
    unsigned char* row_smem = smem + row * 128;
#pragma unroll
    for (int step = 0; step < Spec::kHeadDim / 16; ++step) {
      const float* d = &output[8 * step];
      const uint32_t words[4] = {
          pack<Element>(d[0] * factor, d[1] * factor), pack<Element>(d[2] * factor, d[3] * factor),
          pack<Element>(d[4] * factor, d[5] * factor), pack<Element>(d[6] * factor, d[7] * factor)};
      const int chunk = step % 4 * 2 + lane / 16;
      ptx::stmatrix_x4(row_smem + step / 4 * Spec::kOwnSlabBytes + (chunk ^ (row % 8)) * 16, words);
    }
  }

  template <typename Coordinates>
  static __device__ __forceinline__ void store_global(const ptx::TensorMap& map, const unsigned char* smem, int row,
                                                      const Coordinates& coordinates) {
#pragma unroll
    for (int slab = 0; slab < Spec::kNumSlabs; ++slab) {
      store_box(map, smem + slab * Spec::kOwnSlabBytes, slab * 64, row, coordinates);
    }
  }
};

// Compile-time answers for a generic lambda.
struct Yes {
  static constexpr bool value = true;
};
struct No {
  static constexpr bool value = false;
};

// One arrival per warp: its wgmma_wait ensures that its share of the product has read the buffer; the warp barrier, that
// every lane has read what it loads itself before the first lane arrives.
__device__ __forceinline__ void release(ptx::Mbarrier* empty) {
  ptx::warp_sync();
  if (ptx::lane_index() == 0) ptx::mbarrier_arrive(empty);
}

}  // namespace sm90
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
