// The epilogue of a consumer warpgroup: its 64 rows of output to shared memory, from there by the copy engine to global
// memory, and the log-sum-exp by ordinary stores; or, where keys are split, fp32 partial results by ordinary stores.
#pragma once

#include "attention/forward/sm90/schedule.cuh"
#include "attention/forward/sm90/softmax.cuh"
#include "attention/forward/sm90/spec.cuh"
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

namespace flashmoe {
namespace attention {
namespace sm90 {

// Slabs first_slab to first_slab + kSlabsOfPass - 1 of the accumulator, as 16-bit elements, into
// `smem`. One stmatrix stores the 16 rows of the warp and 16 columns.
template <typename Spec>
__device__ __forceinline__ void store_output_shared(typename Spec::OutputTile smem,
                                                    const float (&output)[Spec::kHeadDim / 2],
                                                    const float (&inverse_sum)[2], int first_slab,
                                                    int thread = ptx::thread_index()) {
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

// Row 0 of the tile's head among the rows of the log-sum-exp, or of the partial results.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ int64_t first_row_of_head(const ForwardParams& params, const Tile& tile) {
  const Sequence<kMask> sequence(params, tile.batch);
  return sequence.result_row(sequence.template result_head<Spec::kIsSplit>(tile.head, tile.split));
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_lse(const ForwardParams& params, const Tile& tile, int consumer,
                                          const float (&lse)[2]) {
  const int lane = ptx::lane_index();
  float* lse_gmem = Spec::kIsSplit ? params.lse_partial : params.lse;
  if (lane % 4 != 0 || lse_gmem == nullptr) return;
  lse_gmem += first_row_of_head<Spec, kMask>(params, tile);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.m_block * Spec::kBlockM + consumer * 64 + ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
    if (row < params.seq_q) ptx::st_global_float(lse_gmem + row, lse[r]);
  }
}

// Normalised fp32 rows of params.out_partial, straight from the accumulators: a quad writes 32 bytes, a whole sector.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_partial(const ForwardParams& params, const Tile& tile, int consumer,
                                              const float (&output)[Spec::kHeadDim / 2], const RowState& rows) {
  float inverse_sum[2];
  float lse[2];
  finish_softmax(rows, inverse_sum, lse, params.scale_log2);
  store_lse<Spec, kMask>(params, tile, consumer, lse);
  const int lane = ptx::lane_index();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.m_block * Spec::kBlockM + consumer * 64 + ptx::warp_index() % 4 * 16 + lane / 4 + 8 * r;
    if (row >= params.seq_q) continue;
    float* row_gmem =
        params.out_partial + (first_row_of_head<Spec, kMask>(params, tile) + row) * params.head_dim + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < Spec::kHeadDim / 8; ++j) {
      const uint32_t pair[2] = {ptx::float_bits(output[4 * j + 2 * r] * inverse_sum[r]),
                                ptx::float_bits(output[4 * j + 2 * r + 1] * inverse_sum[r])};
      if (8 * j < params.head_dim) ptx::st_global_64(row_gmem + 8 * j, pair);
    }
  }
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_tile(const ForwardParams& params, const SharedMemory<Spec>& shared,
                                           const ptx::TensorMap& out_map, const Tile& tile, int consumer,
                                           const float (&output)[Spec::kHeadDim / 2], const RowState& rows) {
  float inverse_sum[2];
  float lse[2];
  finish_softmax(rows, inverse_sum, lse, params.scale_log2);
  store_lse<Spec, kMask>(params, tile, consumer, lse);
  const bool is_storing_thread = ptx::thread_index() % 128 == 0;
  const auto smem = shared.output(consumer);
#pragma unroll
  for (int first_slab = 0; first_slab < Spec::kNumSlabs; first_slab += Spec::kNumOutputSlabs) {
    // Hazard: the store before (of this tile or of the last) still reads the buffer; its thread waits for it.
    if (is_storing_thread) ptx::tma_store_wait_read<0>();
    sync_consumer(consumer);
    store_output_shared<Spec>(smem, output, inverse_sum, first_slab);
    // Hazard: the copy engine reads before all 64 rows are written and visible to it.
    ptx::fence_proxy_async_shared();
    sync_consumer(consumer);
    if (is_storing_thread) {
#pragma unroll
      for (int slab = 0; slab < Spec::kNumOutputSlabs; ++slab) {
        ptx::tma_store_4d(&out_map, smem.slab(slab), (first_slab + slab) * 64,
                          tile.m_block * Spec::kBlockM + consumer * 64, tile.head, tile.batch);
      }
      ptx::tma_store_commit();
    }
  }
}

}  // namespace sm90
}  // namespace attention
}  // namespace flashmoe
