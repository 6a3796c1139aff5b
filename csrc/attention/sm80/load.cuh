// Global to shared memory by cp.async: 16 bytes a thread, eight neighbouring threads to 64 columns of a row.
#pragma once

#include "common/swizzle.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm80 {

// One thread's share of the tiles of one tensor (a head's [rows, head_dim] matrix).
template <typename Spec>
struct TileLoader {
  using Element = typename Spec::Element;
  static constexpr int kRowsPerPass = Spec::kNumThreads / kSegmentChunks;  // a multiple of 8: the swizzle stays the same
  static constexpr int kSegments = Spec::kHeadDim / 64;

  const Element* head_gmem;  // [rows, head_dim] at this thread's row and column of tile 0
  int64_t row_stride;        // elements
  int smem_offset;
  int column;    // first of this thread's eight columns in segment 0
  int head_dim;  // columns from here on are filled with zeros

  __device__ __forceinline__ TileLoader(const void* gmem, int64_t head_offset, int64_t row_stride_, int head_dim_)
      : row_stride(row_stride_), head_dim(head_dim_) {
    const int row = ptx::thread_index() / kSegmentChunks;
    const int chunk = ptx::thread_index() % kSegmentChunks;
    column = chunk * kChunkElements;
    head_gmem = static_cast<const Element*>(gmem) + head_offset + row * row_stride + column;
    smem_offset = swizzled_offset<Spec::kHeadDim>(row, chunk);
  }

  // Starts the copy of kRows rows from `first_row` on; rows from `rows` (counted from first_row) on become zeros, which
  // keeps 0 * NaN out of P V. kIsWhole promises that there are none.
  template <int kRows, bool kIsWhole>
  __device__ __forceinline__ void load(ptx::SmemPointer tile_smem, int first_row, int rows) const {
    const Element* row_gmem = head_gmem + first_row * row_stride;
    const int64_t pass_bytes = kRowsPerPass * row_stride * static_cast<int>(sizeof(Element));
#pragma unroll
    for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
      const bool row_valid = kIsWhole || ptx::thread_index() / kSegmentChunks + pass * kRowsPerPass < rows;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const bool valid = row_valid && column + segment * 64 < head_dim;
        ptx::SmemPointer chunk_smem =
            tile_smem + smem_offset + pass * kRowsPerPass * Spec::kRowBytes + segment * kSegmentChunks * kChunkBytes;
        ptx::cp_async_16(chunk_smem, row_gmem + segment * 64, valid ? kChunkBytes : 0);
      }
      row_gmem = ptx::advance_pointer(row_gmem, pass_bytes);
    }
  }
};

}  // namespace sm80
}  // namespace attention
}  // namespace flashmoe
