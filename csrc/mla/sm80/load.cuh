// A block's keys, by cp.async, and a warp's share of Q, in registers.
#pragma once

#include "device/swizzle.cuh"
#include "mla/plan.cuh"
#include "mla/sm80/spec.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace mla {
namespace sm80 {

// Page of a sequence's key, a number from the table that is kept within the cache.
__device__ __forceinline__ int page_of(const DecodeParams& params, int batch, int index) {
  if (params.block_table == nullptr) return batch;
  const int32_t* page_gmem = params.block_table + batch * params.block_table_stride + index;
  return max(0, min(params.num_pages - 1, static_cast<int>(ptx::ld_global_32(page_gmem))));
}

// One key block of a segment after the other.
template <typename Spec>
struct KeyLoader {
  using Element = typename Spec::Element;

  const DecodeParams& params;
  const Segment& segment;
  // Of this thread's keys of the next block: where they lie, in elements; negative: a zero in their place.
  int64_t offset[Spec::kPasses];

  __device__ __forceinline__ KeyLoader(const DecodeParams& params_, const Segment& segment_)
      : params(params_), segment(segment_) {}

  // Asks for the pages of a block's keys, some time before its load.
  __device__ __forceinline__ void find(int block) {
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      const int key = block * Spec::kBlockN + pass * Spec::kRowsPerPass + ptx::thread_index() / kSegmentChunks;
      offset[pass] = -1;
      if (key >= segment.keys) continue;
      const int index = static_cast<int>(static_cast<uint32_t>(key) / static_cast<uint32_t>(params.page_size));
      offset[pass] = page_of(params, segment.batch, index) * params.page_stride +
                     (key - index * params.page_size) * params.key_stride;
    }
  }

  // Keys past the sequence's become zeros, whatever the cache holds there: 0 * NaN is NaN.
  __device__ __forceinline__ void load(ptx::SmemPointer stage_smem) const {
    const int thread = ptx::thread_index();
    const ptx::SmemPointer thread_smem =
        stage_smem + swizzled_offset<kHeadDim>(thread / kSegmentChunks, thread % kSegmentChunks);
#pragma unroll
    for (int pass = 0; pass < Spec::kPasses; ++pass) {
      const bool exists = offset[pass] >= 0;
      const Element* key_gmem = static_cast<const Element*>(params.cache) + (exists ? offset[pass] : 0) +
                                thread % kSegmentChunks * kChunkElements;
#pragma unroll
      for (int slab = 0; slab < kHeadDim / 64; ++slab) {
        ptx::cp_async_16(
            thread_smem + (pass * Spec::kRowsPerPass * Spec::kRowBytes + slab * (kSegmentChunks * kChunkBytes)),
            key_gmem + slab * 64, exists ? kChunkBytes : 0);
      }
    }
  }
};

// A warp's columns of its rows of Q, as A operands: step j is columns 64 j + 16 * column_warp on. Rows past the last are that one again:
// nobody stores what becomes of them.
template <typename Spec>
__device__ __forceinline__ void load_query(uint32_t (&Q_rmem)[Spec::kMmaM][Spec::kSteps][4], const DecodeParams& params,
                                           int batch, int first_row, int column_warp) {
  const int rows = params.tokens * params.heads;
  const int lane = ptx::lane_index();
  const auto* Q_gmem = static_cast<const typename Spec::Element*>(params.q) + batch * params.q_stride_batch +
                       column_warp * 16 + lane % 4 * 2;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto* row_gmem = Q_gmem + min(rows - 1, first_row + m * 16 + half * 8 + lane / 4) * params.q_stride_row;
#pragma unroll
      for (int step = 0; step < Spec::kSteps; ++step) {
        Q_rmem[m][step][half] = ptx::ld_global_32(row_gmem + step * 64);
        Q_rmem[m][step][2 + half] = ptx::ld_global_32(row_gmem + step * 64 + 8);
      }
    }
}

}  // namespace sm80
}  // namespace mla
}  // namespace flashmoe
