// Epilogue of a warp: normalises, rounds and stores its rows of the output tile, and stores their log-sum-exp.
#pragma once

#include "attention/dropout.cuh"
#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/scores.cuh"
#include "attention/forward/tile.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "device/swizzle.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"

namespace flashmoe::attention::mma_sync {

// warp_smem [kWarpRows, kHeadDim]: the warp's rows of the Q tile, from its first column on. No other warp reads them,
// so __syncwarp semantics are enough between the last read as Q and the writes here.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_output(const ForwardParams& params, const QueryTile& tile, int warp_row,
                                             int first_column, int lane,
                                             const float (&O_rmem)[Spec::kMmaM][Spec::kMmaD][4],
                                             ptx::SmemPointer warp_smem) {
  using Element = typename Spec::Element;
  ptx::warp_sync();  // write after read: Q
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int d = 0; d < Spec::kMmaD; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = m * 16 + half * 8 + lane / 4;
        ptx::st_shared_32(warp_smem + swizzled_offset<Spec::kHeadDim>(row, d) + lane % 4 * 4,
                          pack<Element>(O_rmem[m][d][2 * half], O_rmem[m][d][2 * half + 1]));
      }
  ptx::warp_sync();  // read after write: each row was written by several lanes
  const Strides& stride = params.out_stride;
  Element* out_gmem = static_cast<Element*>(params.out) + rows_of<kMask>(params, tile).row_offset(stride, tile.head_q) +
                      static_cast<int64_t>(tile.row + warp_row) * stride.row + first_column;
  constexpr int kLanesPerRow = kSegmentChunks;
  const int chunk = lane % kLanesPerRow;
#pragma unroll
  for (int pass = 0; pass < Spec::kWarpRows / (32 / kLanesPerRow); ++pass) {
    const int row = pass * (32 / kLanesPerRow) + lane / kLanesPerRow;
#pragma unroll
    for (int segment = 0; segment < Spec::kMmaD / kSegmentChunks; ++segment) {
      const int column = segment * 64 + chunk * kChunkElements;
      if (warp_row + row < tile.rows && first_column + column < value_columns<kMask>(params)) {
        uint32_t value[4];
        ptx::ld_shared_128(value, warp_smem + swizzled_offset<Spec::kHeadDim>(row, segment * kSegmentChunks + chunk));
        ptx::st_global_128(out_gmem + row * stride.row + column, value);
      }
    }
  }
}

// fp32 partial output of one split, straight from the accumulators: a quad writes 32 bytes.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_partial(const ForwardParams& params, const QueryTile& tile, int warp_row,
                                              int first_column, int lane,
                                              const float (&O_rmem)[Spec::kMmaM][Spec::kMmaD][4]) {
  const Sequence<kMask> sequence = rows_of<kMask>(params, tile);
  const int64_t head = sequence.template result_head<Spec::kIsSplit>(tile.head_q, tile.split);
  const int columns = value_columns<kMask>(params);
  float* out_gmem = params.out_partial + (sequence.result_row(head) + tile.row + warp_row) * columns;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m * 16 + half * 8 + lane / 4;
      if (warp_row + row >= tile.rows) continue;
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        const int column = first_column + d * 8 + lane % 4 * 2;
        const uint32_t value[2] = {ptx::float_bits(O_rmem[m][d][2 * half]),
                                   ptx::float_bits(O_rmem[m][d][2 * half + 1])};
        if (column < columns) ptx::st_global_64(out_gmem + row * columns + column, value);
      }
    }
}

// first_column: the warp's first column of the output. Only the warps with column 0 store the log-sum-exp.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void finish_tile(const ForwardParams& params, const QueryTile& tile, int warp_row, int lane,
                                            const RowState (&rows)[Spec::kMmaM][2],
                                            float (&O_rmem)[Spec::kMmaM][Spec::kMmaD][4], ptx::SmemPointer warp_smem,
                                            int first_column = 0) {
  const Sequence<kMask> sequence = rows_of<kMask>(params, tile);
  const int64_t head = sequence.template result_head<Spec::kIsSplit>(tile.head_q, tile.split);
  const bool wants_lse = (Spec::kIsSplit || params.lse != nullptr) && first_column == 0;
  float* lse_gmem = (Spec::kIsSplit ? params.lse_partial : params.lse) + sequence.result_row(head) + tile.row;
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + m * 16 + half * 8 + lane / 4;
      const float sum = quad_sum(rows[m][half].sum);
      const float shift = rows[m][half].max * params.scale_log2;
      FinishedRow finished;
      if constexpr (kMask == MaskKind::kRuntime) {
        // Only one of a row's splits includes its sink.
        const bool has_sink = !Spec::kIsSplit || tile.split == 0;
        finished =
            finish_row(shift, sum,
                       has_sink ? sink_log2(params.score_options, tile.head_q, tile.row + min(row, tile.rows - 1))
                                : ptx::negative_infinity());
      } else {
        finished = finish_row(shift, sum);
      }
      float inverse = finished.inverse;
      if constexpr (Spec::kHasDropout) inverse *= dropout_of(params).scale;
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        O_rmem[m][d][2 * half] *= inverse;
        O_rmem[m][d][2 * half + 1] *= inverse;
      }
      if (wants_lse && lane % 4 == 0 && row < tile.rows) {
        ptx::st_global_float(lse_gmem + row, finished.lse);
      }
    }
  if constexpr (Spec::kIsSplit) {
    store_partial<Spec, kMask>(params, tile, warp_row, first_column, lane, O_rmem);
  } else {
    store_output<Spec, kMask>(params, tile, warp_row, first_column, lane, O_rmem, warp_smem);
  }
}

}  // namespace flashmoe::attention::mma_sync
