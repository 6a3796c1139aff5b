// The epilogue of a consumer warpgroup: its 64 rows of output go to shared memory and from there by TMA to global
// memory, the log-sum-exp by ordinary stores. If keys are split, fp32 partial results are written by ordinary stores.
#pragma once

#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/spec.cuh"
#include "attention/forward/sm90/varlen/folded.cuh"
#include "attention/forward/sm90/varlen/schedule.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "device/convert.cuh"
#include "device/named_barriers.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/tma.cuh"

namespace flashmoe::attention::sm90 {

// The sinks of a thread's two rows times log2(e), -inf for none; row: the first of the two.
__device__ __forceinline__ void load_sinks(const ForwardParams& params, const Tile<MaskKind::kRuntime>& tile, int row,
                                           float (&sink_log2)[2]) {
  const ScoreOptions& options = params.score_options;
  const int folded = options.folded_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = folded > 1 ? tile.head * folded + minimum(row + 8 * r, tile.rows - 1) : tile.head;
    sink_log2[r] =
        options.sinks == nullptr ? ptx::negative_infinity() : ptx::ld_global_float(options.sinks + head) * kLog2E;
  }
}

// Stores slabs first_slab to first_slab + kSlabsOfPass - 1 of the accumulator to `smem`, as 16-bit elements. One
// stmatrix stores 16 columns of the warp's 16 rows.
template <typename Spec>
__device__ __forceinline__ void store_output_shared(typename Spec::OutputTile smem,
                                                    const float (&output)[Spec::kValueDim / 2],
                                                    const float (&inverse_sum)[2], int first_slab, int thread) {
  const int lane = thread % 32;
  const int row = thread / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < Spec::kSlabsOfPass * 4; ++step) {
    const float* d = &output[32 * first_slab + 8 * step];
    const uint32_t words[4] = {
        pack<typename Spec::Element>(d[0] * inverse_sum[0], d[1] * inverse_sum[0]),
        pack<typename Spec::Element>(d[2] * inverse_sum[1], d[3] * inverse_sum[1]),
        pack<typename Spec::Element>(d[4] * inverse_sum[0], d[5] * inverse_sum[0]),
        pack<typename Spec::Element>(d[6] * inverse_sum[1], d[7] * inverse_sum[1]),
    };
    ptx::stmatrix_x4(smem.chunk(row, step / 4, step % 4 * 2 + lane / 16), words);
  }
}

// The first of a thread's two rows in the tile's sequence; the other is 8 further on. Each store recomputes it: a
// common copy would occupy a register throughout the loop over tiles (1% to 2% at D=64, causal).
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int row_of_thread(const Tile<kMask>& tile, int consumer) {
  if constexpr (Spec::kIsTight) {
    const int thread = ptx::recompute(ptx::thread_index());
    return tile.m_block * Spec::kBlockM + consumer * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
  }
  return tile.m_block * Spec::kBlockM + consumer * 64 + ptx::warp_index() % 4 * 16 + ptx::lane_index() / 4;
}

// Row 0 of the tile's head among the rows of the log-sum-exp, or of the partial results.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int64_t first_row_of_head(const ForwardParams& params, const Tile<kMask>& tile) {
  const Sequence<kMask> sequence = tile.sequence(params);
  int split = 0;
  if constexpr (Spec::kIsSplit) split = tile.split;
  return sequence.result_row(sequence.template result_head<Spec::kIsSplit>(tile.head, split));
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_lse(const ForwardParams& params, const Tile<kMask>& tile, int consumer,
                                          const float (&lse)[2]) {
  float* lse_gmem = Spec::kIsSplit ? params.lse_partial : params.lse;
  if (ptx::lane_index() % 4 != 0 || lse_gmem == nullptr) return;
  lse_gmem += first_row_of_head<Spec>(params, tile);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of_thread<Spec>(tile, consumer) + 8 * r;
    if (row < tile.num_rows(params)) ptx::st_global_float(lse_gmem + row, lse[r]);
  }
}

// Normalised fp32 rows of params.out_partial, straight from the accumulators: a quad writes 32 bytes, one sector.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_partial(const ForwardParams& params, const Tile<kMask>& tile, int consumer,
                                              const float (&output)[Spec::kValueDim / 2],
                                              const float (&inverse_sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_of_thread<Spec>(tile, consumer) + 8 * r;
    if (row >= params.seq_q) continue;
    float* row_gmem = params.out_partial + (first_row_of_head<Spec>(params, tile) + row) * params.head_dim +
                      ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int j = 0; j < Spec::kValueDim / 8; ++j) {
      const uint32_t pair[2] = {ptx::float_bits(output[4 * j + 2 * r] * inverse_sum[r]),
                                ptx::float_bits(output[4 * j + 2 * r + 1] * inverse_sum[r])};
      if (8 * j < params.head_dim) ptx::st_global_64(row_gmem + 8 * j, pair);
    }
  }
}

// The same for a tile of folded heads: the final result if the tile's keys are not split, otherwise that of this split.
template <typename Spec>
__device__ __forceinline__ void store_folded_lse(const ForwardParams& params, const VarlenTile& tile, int consumer,
                                                 const float (&lse)[2]) {
  float* lse_gmem = params.num_splits > 1 ? params.lse_partial : params.lse;
  if (ptx::lane_index() % 4 != 0 || lse_gmem == nullptr) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FoldedRow at = folded_row(tile, row_of_thread<Spec>(tile, consumer) + 8 * r);
    if (at.is_there) ptx::st_global_float(lse_gmem + result_of(params, tile, at), lse[r]);
  }
}
template <typename Spec>
__device__ __forceinline__ void store_folded_partial(const ForwardParams& params, const VarlenTile& tile, int consumer,
                                                     const float (&output)[Spec::kValueDim / 2],
                                                     const float (&inverse_sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FoldedRow at = folded_row(tile, row_of_thread<Spec>(tile, consumer) + 8 * r);
    if (!at.is_there) continue;
    float* row_gmem = params.out_partial + result_of(params, tile, at) * params.head_dim_v + ptx::lane_index() % 4 * 2;
#pragma unroll
    for (int j = 0; j < Spec::kValueDim / 8; ++j) {
      const uint32_t pair[2] = {ptx::float_bits(output[4 * j + 2 * r] * inverse_sum[r]),
                                ptx::float_bits(output[4 * j + 2 * r + 1] * inverse_sum[r])};
      if (8 * j < params.head_dim_v) ptx::st_global_64(row_gmem + 8 * j, pair);
    }
  }
}

// Stores slabs from first_slab on of the warpgroup's rows before the sequence's end, from shared memory. The rows after
// them in the output belong to the next sequence.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_tail_rows(const ForwardParams& params, const Tile<kMask>& tile, int first_row,
                                                typename Spec::OutputTile smem, int first_slab, int first_column) {
  using Element = typename Spec::Element;
  const Strides& stride = params.out_stride;
  Element* out_gmem =
      static_cast<Element*>(params.out) + tile.sequence(params).row_offset(stride, tile.head) + first_row * stride.row;
  const int chunk = ptx::lane_index() % 8;
#pragma unroll
  for (int slab = 0; slab < Spec::kSlabsOfPass; ++slab) {
    const int column = first_column + (first_slab + slab) * 64 + chunk * 8;
    for (int row = ptx::thread_index() % 128 / 8; row < tile.rows - first_row; row += 16) {
      if (column >= params.head_dim_v) continue;
      uint32_t words[4];
      ptx::ld_shared_128(words, smem.chunk(row, slab, chunk));
      ptx::st_global_128(out_gmem + row * stride.row + column, words);
    }
  }
}

// The same for a tile of folded heads; first: the warpgroup's first position.
template <typename Spec>
__device__ __forceinline__ void store_folded_tail_rows(const ForwardParams& params, const VarlenTile& tile, int first,
                                                       typename Spec::OutputTile smem, int first_slab) {
  using Element = typename Spec::Element;
  const Strides& stride = params.out_stride;
  const int chunk = ptx::lane_index() % 8;
  const int first_of_warpgroup = first << folding_of(tile).shift;
  for (int row = ptx::thread_index() % 128 / 8; row < 64; row += 16) {
    const FoldedRow at = folded_row(tile, first_of_warpgroup + row);
    if (!at.is_there) continue;
    Element* row_gmem = static_cast<Element*>(params.out) + tile.sequence(params).row_offset(stride, at.head) +
                        at.position * stride.row;
#pragma unroll
    for (int slab = 0; slab < Spec::kSlabsOfPass; ++slab) {
      const int column = (first_slab + slab) * 64 + chunk * 8;
      if (column >= params.head_dim_v) continue;
      uint32_t words[4];
      ptx::ld_shared_128(words, smem.chunk(row, slab, chunk));
      ptx::st_global_128(row_gmem + column, words);
    }
  }
}

// Full 64-row tiles, and tiles of dense rows, which TMA clips at the tensor's end, are stored by TMA; the last rows of
// a ragged sequence by predicated stores. first_column: for tiles that compute a part of the output's columns.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_tile(const ForwardParams& params, const SharedMemory<Spec>& shared,
                                           const ptx::TensorMap& out_map, const Tile<kMask>& tile, int query_stage,
                                           int consumer, const float (&output)[Spec::kValueDim / 2],
                                           const float (&inverse_sum)[2], int first_column = 0) {
  const auto smem = shared.output(query_stage, consumer);
  const bool is_storing_thread = ptx::thread_index() % 128 == 0;
  const int first_row = position_of<Spec>(tile, tile.m_block * Spec::kBlockM + consumer * 64);
  const bool is_ragged = kMask == MaskKind::kRuntime && params.sequences.cu_seqlens_q != nullptr;
  const bool has_tail = is_ragged && first_row + position_of<Spec>(tile, 64) > tile.num_rows(params);
#pragma unroll
  for (int first_slab = 0; first_slab < Spec::kNumValueSlabs; first_slab += Spec::kSlabsOfPass) {
    // Hazard: the previous store (of this tile or of the last one) still reads the buffer; the thread that issued it
    // waits for it. If the output overwrites Q: the tensor cores still read Q for another warp of the warpgroup.
    if (!Spec::kHasOutputInQuery && is_storing_thread) ptx::tma_store_wait_read<0>();
    sync_consumer(consumer);
    // With kRuntime the addresses are recomputed here: the loop of the tile has no register to keep them in.
    const int thread = ptx::thread_index();
    store_output_shared<Spec>(smem, output, inverse_sum, first_slab,
                              kMask == MaskKind::kRuntime || Spec::kIsTight ? ptx::recompute(thread) : thread);
    // Hazard: TMA, or another thread, reads before all 64 rows are written and visible to it.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
    if (has_tail) {
      if constexpr (Spec::kIsFolded) {
        store_folded_tail_rows<Spec>(params, tile, first_row, smem, first_slab);
      } else if constexpr (kMask == MaskKind::kRuntime) {
        store_tail_rows<Spec>(params, tile, first_row, smem, first_slab, first_column);
      }
    } else if (is_storing_thread) {
#pragma unroll
      for (int slab = 0; slab < Spec::kSlabsOfPass; ++slab) {
        int row = tile.m_block * Spec::kBlockM + consumer * 64;
        if constexpr (kMask == MaskKind::kRuntime) row = tile.first_row + first_row;
        if constexpr (Spec::kIsFolded) {
          ptx::tma_store_5d(&out_map, smem.slab(slab), (first_slab + slab) * 64, /*head of the group*/ 0, row,
                            folding_of(tile).kv_head, is_ragged ? 0 : tile.batch);
          continue;
        }
        ptx::tma_store_4d(&out_map, smem.slab(slab), first_column + (first_slab + slab) * 64, row, tile.head,
                          is_ragged ? 0 : tile.batch);
      }
      ptx::tma_store_commit();
    }
  }
}

}  // namespace flashmoe::attention::sm90
