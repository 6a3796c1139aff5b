// Merges the outputs of a block's warps into that of the block, and those of an item's blocks into the result.
//
// A partial result of a row is (out, shift, sum): out and sum are sums over keys of exp2(score * scale_log2 - shift)
// times V or 1. Partial results are added in the order of warps and of blocks, so that the result does not depend on
// which block is last.
#pragma once

#include "attention/decode/plan.cuh"
#include "attention/forward/mma_sync/softmax.cuh"
#include "attention/params/forward.h"
#include "attention/scores.cuh"
#include "attention/softmax.cuh"
#include "attention/sequences.cuh"
#include "device/convert.cuh"
#include "device/reduce.cuh"
#include "ptx/atomics.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::decode {

constexpr int kColumns = 4;  // columns of a row per thread

// The partial result of a row, for kColumns columns.
struct PartialRow {
  float out[kColumns];
  float shift;
  float sum;
};

// The weight of a partial result with shift `shift` among others whose largest shift is `largest`. If that is -inf, no
// key was seen (or every score was NaN, which the sums carry).
__device__ __forceinline__ float weight_of(float shift, float largest) {
  return largest == ptx::negative_infinity() ? 1.0f : ptx::exp2_approx(ptx::sub_rn(shift, largest));
}

__device__ __forceinline__ void add_weighted(PartialRow& total, float weight, const float4& out, float sum) {
  total.out[0] = ptx::fma_rn(weight, out.x, total.out[0]);
  total.out[1] = ptx::fma_rn(weight, out.y, total.out[1]);
  total.out[2] = ptx::fma_rn(weight, out.z, total.out[2]);
  total.out[3] = ptx::fma_rn(weight, out.w, total.out[3]);
  total.sum = ptx::fma_rn(weight, sum, total.sum);
}

// The partial results of a block's warps in shared memory.
template <typename Spec>
struct WarpResults {
  ptx::SmemPointer block_smem;

  __device__ __forceinline__ ptx::SmemPointer out(int warp, int row, int column) const {
    return block_smem + (warp * Spec::kRingBytes + row * Spec::kOutputRowBytes + column * 4);
  }
  __device__ __forceinline__ ptx::SmemPointer state(int warp, int row) const {
    return block_smem + (Spec::kNumWarps * (Spec::kRingBytes + Spec::kQueryBytes) + warp * Spec::kStateBytes + row * 8);
  }
  __device__ __forceinline__ ptx::SmemPointer arrival() const {
    return block_smem + Spec::kNumWarps * (Spec::kRingBytes + Spec::kQueryBytes + Spec::kStateBytes);
  }
  // This warp's copy of Q, if it has one. 1024-byte aligned for the swizzle.
  __device__ __forceinline__ ptx::SmemPointer query() const {
    return block_smem + Spec::kQueryOffset + ptx::warp_index() * Spec::kQueryBytes;
  }

  __device__ __forceinline__ void store(const mma_sync::RowState (&rows)[1][2],
                                        const float (&O_rmem)[1][Spec::kMmaD][4], float scale_log2) const {
    const int lane = ptx::recompute(ptx::lane_index());
    const int warp = ptx::recompute(ptx::warp_index());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = half * 8 + lane / 4;
      const float sum = quad_sum(rows[0][half].sum);
      if (lane % 4 == 0) {
        const uint32_t words[2] = {ptx::float_bits(rows[0][half].max * scale_log2), ptx::float_bits(sum)};
        ptx::st_shared_64(state(warp, row), words);
      }
#pragma unroll
      for (int d = 0; d < Spec::kMmaD; ++d) {
        const uint32_t words[2] = {ptx::float_bits(O_rmem[0][d][2 * half]),
                                   ptx::float_bits(O_rmem[0][d][2 * half + 1])};
        ptx::st_shared_64(out(warp, row, Spec::output_column(d, lane % 4)), words);
      }
    }
  }

  __device__ __forceinline__ PartialRow add(int row, int column) const {
    float shift[Spec::kNumWarps];
    float sum[Spec::kNumWarps];
    PartialRow total{};
    total.shift = ptx::negative_infinity();
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) {
      uint32_t words[2];
      ptx::ld_shared_64(words, state(warp, row));
      shift[warp] = ptx::bits_float(words[0]);
      sum[warp] = ptx::bits_float(words[1]);
      total.shift = ptx::max_ftz(total.shift, shift[warp]);
    }
#pragma unroll
    for (int warp = 0; warp < Spec::kNumWarps; ++warp) {
      add_weighted(total, weight_of(shift[warp], total.shift), ptx::ld_shared_float4(out(warp, row, column)),
                   sum[warp]);
    }
    return total;
  }
};

// Partial results in global memory: out_partial [2 * blocks, rows, kHeadDim], lse_partial [2 * blocks, rows, 2], with
// as many rows as an item can have.
template <typename Spec>
__device__ __forceinline__ int rows_of_slot(const ForwardParams& params) {
  return min(Spec::kBlockM, params.seq_q * params.score_options.folded_heads);
}
template <typename Spec>
__device__ __forceinline__ int64_t partial_row(const ForwardParams& params, int slot, int row) {
  return static_cast<int64_t>(slot) * rows_of_slot<Spec>(params) + row;
}

template <typename Spec>
__device__ __forceinline__ void store_partial(const ForwardParams& params, int slot, int row, int column,
                                              const PartialRow& partial) {
  const int64_t at = partial_row<Spec>(params, slot, row);
  const uint32_t out[4] = {ptx::float_bits(partial.out[0]), ptx::float_bits(partial.out[1]),
                           ptx::float_bits(partial.out[2]), ptx::float_bits(partial.out[3])};
  ptx::st_global_128(params.out_partial + at * Spec::kHeadDim + column, out);
  if (column == 0) {
    const uint32_t state[2] = {ptx::float_bits(partial.shift), ptx::float_bits(partial.sum)};
    ptx::st_global_64(params.lse_partial + at * 2, state);
  }
}

// The sum over the blocks of an item.
template <typename Spec>
__device__ __forceinline__ PartialRow add_blocks(const ForwardParams& params, const ItemSplit& item_split, int row,
                                                 int column) {
  constexpr int kAtOnce = 16;                        // loads in flight, as many as there are registers for
  const int slot_rows = rows_of_slot<Spec>(params);  // rows of one slot, of which a block has two
  PartialRow total{};
  total.shift = ptx::negative_infinity();
  // The partial results of the first block may be in its second slot.
  const int64_t at = partial_row<Spec>(params, slot_of(item_split.first_block, false), row);
  const float* out_gmem = params.out_partial + at * Spec::kHeadDim + column;
  const float* state_gmem = params.lse_partial + at * 2;
  int later = item_split.starts_late ? slot_rows : 0;
  for (int left = item_split.last_block - item_split.first_block + 1; left > 0; left -= kAtOnce) {
    float4 out[kAtOnce];
    float shift[kAtOnce];
    float sum[kAtOnce];
    float largest = total.shift;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // What no block has stored counts for nothing. (A register that only some paths set would be live throughout the
      // kernel.)
      out[i] = float4{0.0f, 0.0f, 0.0f, 0.0f};
      shift[i] = ptx::negative_infinity();
      sum[i] = 0.0f;
      if (i < left) {
        const int rows = 2 * i * slot_rows + (i == 0 ? later : 0);
        uint32_t state[2];
        ptx::ld_global_64(state, state_gmem + rows * 2);
        shift[i] = ptx::bits_float(state[0]);
        sum[i] = ptx::bits_float(state[1]);
        out[i] = ptx::ld_global_float4(out_gmem + rows * Spec::kHeadDim);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) largest = ptx::max_ftz(largest, shift[i]);
    const float rescale = weight_of(total.shift, largest);
    total.shift = largest;
    total.sum *= rescale;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) total.out[i] *= rescale;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) add_weighted(total, weight_of(shift[i], largest), out[i], sum[i]);
    out_gmem += 2 * kAtOnce * slot_rows * Spec::kHeadDim;
    state_gmem += 2 * kAtOnce * slot_rows * 2;
    later = 0;
  }
  return total;
}

// Adds the sink to the sum, once; then divides, rounds and stores the row.
template <typename Spec>
__device__ __forceinline__ void store_result(const ForwardParams& params, const Segment& segment, int row, int column,
                                             const PartialRow& total) {
  using Element = typename Spec::Element;
  const QueryRow at_row = query_row<Spec>(params, segment, row);
  const int folded = at_row.head - segment.head_kv * params.score_options.folded_heads;
  const FinishedRow finished =
      finish_row(total.shift, total.sum, sink_log2(params.score_options, segment.head_kv, folded));
  const Sequence<MaskKind::kRuntime> sequence = segment.sequence(params);
  if (column == 0 && params.lse != nullptr) {
    const int64_t at = sequence.result_row(sequence.template result_head<false>(at_row.head, 0)) + at_row.position;
    ptx::st_global_float(params.lse + at, finished.lse);
  }
  if (column >= params.head_dim_v) return;
  const uint32_t packed[2] = {pack<Element>(total.out[0] * finished.inverse, total.out[1] * finished.inverse),
                              pack<Element>(total.out[2] * finished.inverse, total.out[3] * finished.inverse)};
  Element* out_gmem = static_cast<Element*>(params.out) + sequence.row_offset(params.out_stride, /*head=*/0) +
                      at_row.offset(params.out_stride);
  ptx::st_global_64(out_gmem + column, packed);
}

// Calls function(row, column) for each row and group of four columns that this thread handles.
template <typename Spec, typename Function>
__device__ __forceinline__ void for_each_part(const Segment& segment, Function function) {
  constexpr int kThreadsPerRow = Spec::kHeadDim / kColumns;
  const int thread = ptx::recompute(ptx::thread_index());
  const int column = thread % kThreadsPerRow * kColumns;
#pragma unroll 1
  for (int row = thread / kThreadsPerRow; row < segment.rows; row += Spec::kNumThreads / kThreadsPerRow) {
    function(row, column);
  }
}

// Returns true in the last of the item's blocks to arrive, when the partial results of all of them are stored.
template <typename Spec>
__device__ __forceinline__ bool is_last_to_arrive(const ForwardParams& params, const ItemSplit& item_split,
                                                  const WarpResults<Spec>& results) {
  ptx::barrier_sync_block();  // the block's partial results are stored
  if (ptx::thread_index() == 0) {
    // No other shared item begins in first_block, so its counter belongs to this item.
    int32_t* counter_gmem = params.tile_counter + item_split.first_block;
    const int others = item_split.last_block - item_split.first_block;
    const bool is_last = ptx::atomic_add_global_ordered(counter_gmem, 1) == others;
    if (is_last) ptx::st_global_32(counter_gmem, 0);  // for the next launch
    ptx::st_shared_32(results.arrival(), is_last ? 1u : 0u);
  }
  ptx::barrier_sync_block();  // read after write: the answer
  return ptx::ld_shared_32(results.arrival()) != 0;
}

// On entry every warp's partial results are in shared memory, but not yet waited for. On return other warps may still
// read them.
template <typename Spec>
__device__ __forceinline__ void finish_segment(const ForwardParams& params, const Segment& segment,
                                               const ItemSplit& item_split, const WarpResults<Spec>& results) {
  ptx::barrier_sync_block();  // read after write: the warps' results
  const bool is_shared = item_split.first_block != item_split.last_block;
  if (is_shared) {
    for_each_part<Spec>(segment, [&](int row, int column) {
      store_partial<Spec>(params, item_split.slot, row, column, results.add(row, column));
    });
    if (!is_last_to_arrive<Spec>(params, item_split, results)) return;
  }
  for_each_part<Spec>(segment, [&](int row, int column) {
    const PartialRow total = is_shared ? add_blocks<Spec>(params, item_split, row, column) : results.add(row, column);
    store_result<Spec>(params, segment, row, column, total);
  });
}

}  // namespace flashmoe::attention::decode
