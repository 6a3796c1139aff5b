// The epilogue of a consumer warpgroup where rows are ragged: whole 64-row tiles go out by the copy engine, as those of dense rows, which it
// cuts at the tensor's end; the last rows of a ragged sequence by predicated stores, since the next sequence's follow.
#pragma once

#include "attention/forward/sm90/epilogue.cuh"
#include "attention/forward/sm90/varlen/scores.cuh"

namespace flashmoe {
namespace attention {
namespace sm90 {

// The sinks of a thread's two rows times log2(e), -inf for none; row: the first of the two. Asked for before the last product, which
// hides the time that they take.
__device__ __forceinline__ void load_sinks(const ForwardParams& params, const VarlenTile& tile, int row,
                                           float (&sink_log2)[2]) {
  constexpr float kLog2E = 1.4426950408889634f;
  const int folded = params.score_options.folded_heads;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = folded > 1 ? tile.head * folded + minimum(row + 8 * r, tile.rows - 1) : tile.head;
    sink_log2[r] = params.score_options.sinks == nullptr
                       ? ptx::negative_infinity()
                       : ptx::ld_global_float(params.score_options.sinks + head) * kLog2E;
  }
}

__device__ __forceinline__ void finish_rows(const ForwardParams& params, const RowState& rows, float scale_log2,
                                            const float (&sink_log2)[2], float (&inverse_sum)[2], float (&lse)[2]) {
  if (params.score_options.sinks == nullptr) {
    finish_softmax(rows, inverse_sum, lse, scale_log2);
  } else {
    finish_softmax_with_sinks(rows, inverse_sum, lse, scale_log2, sink_log2);
  }
}

__device__ __forceinline__ void store_varlen_lse(const ForwardParams& params, const VarlenTile& tile, int row,
                                                 const float (&lse)[2]) {
  if (ptx::lane_index() % 4 != 0 || params.lse == nullptr) return;
  const VarlenSequence sequence = tile.sequence(params);
  float* lse_gmem = params.lse + sequence.result_row(sequence.template result_head<false>(tile.head, 0));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (row + 8 * r < tile.rows) ptx::st_global_float(lse_gmem + row + 8 * r, lse[r]);
  }
}

// Slabs first_slab on of the warpgroup's rows before tile.rows, from shared memory.
template <typename Spec>
__device__ __forceinline__ void store_tail_rows(const ForwardParams& params, const VarlenTile& tile, int first_row,
                                                typename Spec::OutputTile smem, int first_slab) {
  using Element = typename Spec::Element;
  const Strides& stride = params.out_stride;
  Element* out_gmem =
      static_cast<Element*>(params.out) + tile.sequence(params).row_offset(stride, tile.head) + first_row * stride.row;
  const int chunk = ptx::lane_index() % 8;
#pragma unroll
  for (int slab = 0; slab < Spec::kSlabsOfPass; ++slab) {
    const int column = (first_slab + slab) * 64 + chunk * 8;
    for (int row = ptx::thread_index() % 128 / 8; row < tile.rows - first_row; row += 16) {
      if (column >= params.head_dim_v) continue;
      uint32_t words[4];
      ptx::ld_shared_128(words, smem.chunk(row, slab, chunk));
      ptx::st_global_128(out_gmem + row * stride.row + column, words);
    }
  }
}

template <typename Spec>
__device__ __forceinline__ void store_varlen_tile(const ForwardParams& params, const SharedMemory<Spec>& shared,
                                                  const ptx::TensorMap& out_map, const VarlenTile& tile, int consumer,
                                                  typename Spec::OutputTile smem,
                                                  const float (&output)[Spec::kHeadDim / 2],
                                                  const float (&inverse_sum)[2]) {
  const bool is_storing_thread = ptx::thread_index() % 128 == 0;
  const int first_row = tile.m_block * Spec::kBlockM + consumer * 64;
  const bool is_ragged = params.sequences.cu_seqlens_q != nullptr;
  const bool has_tail = is_ragged && first_row + 64 > tile.rows;
#pragma unroll
  for (int first_slab = 0; first_slab < Spec::kNumSlabs; first_slab += Spec::kSlabsOfPass) {
    // Hazard: the store before (of this tile or of the last) still reads the buffer; its thread waits for it. Or: the tensor cores still
    // read Q for another warp of the warpgroup.
    if (!Spec::kHasOutputInQuery && is_storing_thread) ptx::tma_store_wait_read<0>();
    sync_consumer(consumer);
    store_output_shared<Spec>(smem, output, inverse_sum, first_slab, ptx::recompute(ptx::thread_index()));
    // Hazard: the copy engine, or another thread, reads before all 64 rows are written and visible to it.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
    if (has_tail) {
      store_tail_rows<Spec>(params, tile, first_row, smem, first_slab);
    } else if (is_storing_thread) {
#pragma unroll
      for (int slab = 0; slab < Spec::kSlabsOfPass; ++slab) {
        ptx::tma_store_4d(&out_map, smem.slab(slab), (first_slab + slab) * 64, tile.first_row + first_row, tile.head,
                          is_ragged ? 0 : tile.batch);
      }
      ptx::tma_store_commit();
    }
  }
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
