// Copies tiles from global to shared memory through registers: the loads of a tile are issued early, its stores follow
// when the shared memory is free, and a matrix product hides the latency.
#pragma once

#include "attention/masks.cuh"
#include "attention/sequences.cuh"
#include "device/swizzle.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm75 {

// One thread's chunks of a [kRows, kHeadDim] tile; eight neighbouring threads hold 64 columns of a row.
template <typename Spec, int kRows>
struct StagedTile {
  using Element = typename Spec::Element;
  static constexpr int kRowsPerPass =
      Spec::kNumThreads / kSegmentChunks;  // a multiple of 8: the swizzle stays the same
  static constexpr int kPasses = kRows / kRowsPerPass;
  static constexpr int kSegments = Spec::kHeadDim / 64;

  uint32_t chunk_rmem[kPasses][kSegments][4];

  // tile_gmem: the tile's first row. Rows from `rows` on and columns from head_dim on become zeros, which keeps 0 * NaN
  // out of P V.
  __device__ __forceinline__ void fetch(const Element* tile_gmem, int64_t row_stride, int head_dim, int rows) {
    const int thread = ptx::recompute(ptx::thread_index());
    const int thread_column = thread % kSegmentChunks * kChunkElements;
    const int thread_row = thread / kSegmentChunks;
    const Element* row_gmem = tile_gmem + thread_row * row_stride + thread_column;
    const int64_t pass_bytes = ptx::recompute(row_stride) * (kRowsPerPass * static_cast<int>(sizeof(Element)));
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        uint32_t (&chunk)[4] = chunk_rmem[pass][segment];
        chunk[0] = chunk[1] = chunk[2] = chunk[3] = 0;
        if (thread_row + pass * kRowsPerPass < rows && segment * 64 + thread_column < head_dim) {
          ptx::ld_global_128(chunk, row_gmem + segment * 64);
        }
      }
      row_gmem = ptx::advance_pointer(row_gmem, pass_bytes);
    }
  }

  // The same for keys of a Batch from `first_key` on, row by row; keys outside `visible` become zeros.
  __device__ __forceinline__ void fetch_varlen(const Element* head_gmem, const Strides& stride, int columns,
                                               const Sequence<MaskKind::kRuntime>& sequence, int first_key,
                                               KeyRange visible) {
    const int thread = ptx::recompute(ptx::thread_index());
    const int thread_column = thread % kSegmentChunks * kChunkElements;
    const bool is_paged = sequence.params.sequences.block_table != nullptr;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int key = first_key + pass * kRowsPerPass + thread / kSegmentChunks;
      const bool row_valid = key >= visible.begin && key < visible.end;
      int64_t offset = key * stride.row;
      if (row_valid && is_paged) {
        offset = sequence.page_of(key) * stride.batch + key % sequence.params.sequences.page_size * stride.row;
      }
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        uint32_t (&chunk)[4] = chunk_rmem[pass][segment];
        chunk[0] = chunk[1] = chunk[2] = chunk[3] = 0;
        if (row_valid && segment * 64 + thread_column < columns) {
          ptx::ld_global_128(chunk, head_gmem + offset + segment * 64 + thread_column);
        }
      }
    }
  }

  __device__ __forceinline__ void store(ptx::SmemPointer tile_smem) const {
    const int thread = ptx::recompute(ptx::thread_index());
    const ptx::SmemPointer thread_smem =
        tile_smem + swizzled_offset<Spec::kHeadDim>(thread / kSegmentChunks, thread % kSegmentChunks);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass)
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment)
        ptx::st_shared_128(
            thread_smem + (pass * kRowsPerPass * Spec::kRowBytes + segment * (kSegmentChunks * kChunkBytes)),
            chunk_rmem[pass][segment]);
  }
};

}  // namespace flashmoe::attention::sm75
