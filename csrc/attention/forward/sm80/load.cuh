// Copies from global to shared memory with cp.async: 16 bytes per thread, eight adjacent threads per 64 columns of a
// row.
#pragma once

#include "attention/masks.cuh"
#include "attention/sequences.cuh"
#include "device/swizzle.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm80 {

// One thread's share of the tiles of one tensor (a head's [rows, head_dim] matrix), walked in ascending or descending
// order of rows. One running pointer is the only state, because the next tile begins where this one ends.
template <typename Spec, bool kIsAscending = true>
struct TileLoader {
  using Element = typename Spec::Element;
  static constexpr int kRowsPerPass =
      Spec::kNumThreads / kSegmentChunks;  // a multiple of 8: the swizzle stays the same
  static constexpr int kSegments = Spec::kHeadDim / 64;

  const Element* next_gmem;  // this thread's chunk in the next pass

  // The next tile begins with row `row` of the matrix that starts at `head_gmem`; if descending, the tile ends before
  // that row.
  __device__ __forceinline__ TileLoader(const void* head_gmem, int64_t row_stride, int row)
      : next_gmem(static_cast<const Element*>(head_gmem) +
                  (row - (kIsAscending ? 0 : kRowsPerPass) + ptx::thread_index() / kSegmentChunks) * row_stride +
                  ptx::thread_index() % kSegmentChunks * kChunkElements) {}

  // Continues where another loader has stopped.
  __device__ __forceinline__ explicit TileLoader(const Element* next_gmem_) : next_gmem(next_gmem_) {}

  // Starts the copy of a tile of kRows rows. Rows from `rows` on and columns from head_dim on become zeros, which keeps
  // 0 * NaN out of P V; kIsWhole promises that all rows exist.
  template <int kRows, bool kIsWhole>
  __device__ __forceinline__ void load(ptx::SmemPointer tile_smem, int64_t row_stride, int head_dim, int rows = kRows) {
    const int thread = ptx::recompute(ptx::thread_index());
    const int thread_row = thread / kSegmentChunks;
    const int thread_column = thread % kSegmentChunks * kChunkElements;
    const int64_t pass_bytes = ptx::recompute(row_stride) * (kRowsPerPass * static_cast<int>(sizeof(Element)));
    const ptx::SmemPointer thread_smem =
        tile_smem + swizzled_offset<Spec::kHeadDim>(thread_row, thread % kSegmentChunks);
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i) {
      const int pass = kIsAscending ? i : kRows / kRowsPerPass - 1 - i;
      const bool row_valid = kIsWhole || thread_row + pass * kRowsPerPass < rows;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const bool valid = row_valid && segment * 64 + thread_column < head_dim;
        ptx::cp_async_16(
            thread_smem + (pass * kRowsPerPass * Spec::kRowBytes + segment * (kSegmentChunks * kChunkBytes)),
            next_gmem + segment * 64, valid ? kChunkBytes : 0);
      }
      next_gmem = ptx::advance_pointer(next_gmem, kIsAscending ? pass_bytes : -pass_bytes);
    }
  }

  // The same, but rows before `begin` become zeros too. kEndsInside promises that all rows are before `end`.
  template <int kRows, bool kEndsInside>
  __device__ __forceinline__ void load_between(ptx::SmemPointer tile_smem, int64_t row_stride, int columns, int begin,
                                               int end) {
    const int thread = ptx::recompute(ptx::thread_index());
    const int thread_row = thread / kSegmentChunks;
    const int thread_column = thread % kSegmentChunks * kChunkElements;
    const int64_t pass_bytes = ptx::recompute(row_stride) * (kRowsPerPass * static_cast<int>(sizeof(Element)));
    const ptx::SmemPointer thread_smem =
        tile_smem + swizzled_offset<Spec::kHeadDim>(thread_row, thread % kSegmentChunks);
#pragma unroll
    for (int i = 0; i < kRows / kRowsPerPass; ++i) {
      const int pass = kIsAscending ? i : kRows / kRowsPerPass - 1 - i;
      const int row = thread_row + pass * kRowsPerPass;
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const bool valid = row >= begin && (kEndsInside || row < end) && segment * 64 + thread_column < columns;
        ptx::cp_async_16(
            thread_smem + (pass * kRowsPerPass * Spec::kRowBytes + segment * (kSegmentChunks * kChunkBytes)),
            next_gmem + segment * 64, valid ? kChunkBytes : 0);
      }
      next_gmem = ptx::advance_pointer(next_gmem, kIsAscending ? pass_bytes : -pass_bytes);
    }
  }
};

// Loads kRows keys of a Batch from `first_key` on, row by row, because pages are not contiguous. Keys outside
// `visible`, whose pages may not belong to the sequence, become zeros.
template <typename Spec, int kRows>
__device__ __forceinline__ void load_varlen_tile(ptx::SmemPointer tile_smem, const typename Spec::Element* head_gmem,
                                                 const Strides& stride, int columns,
                                                 const Sequence<MaskKind::kRuntime>& sequence, int first_key,
                                                 KeyRange visible) {
  constexpr int kRowsPerPass = Spec::kNumThreads / kSegmentChunks;
  const int thread = ptx::recompute(ptx::thread_index());
  const int thread_row = thread / kSegmentChunks;
  const int thread_column = thread % kSegmentChunks * kChunkElements;
  const ptx::SmemPointer thread_smem = tile_smem + swizzled_offset<Spec::kHeadDim>(thread_row, thread % kSegmentChunks);
  const bool is_paged = sequence.params.sequences.block_table != nullptr;
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const int key = first_key + pass * kRowsPerPass + thread_row;
    const bool row_valid = key >= visible.begin && key < visible.end;
    int64_t offset = 0;
    if (row_valid) {
      if (is_paged) {
        const int page_size = sequence.params.sequences.page_size;
        offset = sequence.page_of(key) * stride.batch + key % page_size * stride.row;
      } else {
        offset = key * stride.row;
      }
    }
    const typename Spec::Element* row_gmem = head_gmem + offset + thread_column;
#pragma unroll
    for (int segment = 0; segment < Spec::kHeadDim / 64; ++segment) {
      const bool valid = row_valid && segment * 64 + thread_column < columns;
      ptx::cp_async_16(thread_smem + (pass * kRowsPerPass * Spec::kRowBytes + segment * (kSegmentChunks * kChunkBytes)),
                       row_gmem + segment * 64, valid ? kChunkBytes : 0);
    }
  }
}

}  // namespace flashmoe::attention::sm80
