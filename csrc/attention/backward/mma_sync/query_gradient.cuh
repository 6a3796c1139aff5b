// The kernel of dq and row_dot. A thread block owns kOwnRows rows of Q and dO; K and V stream past, from the last block
// that a row sees down to the first.
//
// Per block a warp computes dP = dO V^T; S = Q K^T; dS = P * (dP - row_dot); dQ += dS K. The accumulators of dS are its
// left operand. Two warps that share rows compute dS of half of the keys each, exchange them, and add to half of the
// columns each.
#pragma once

#include "attention/backward/mma_sync/dropout.cuh"
#include "attention/backward/mma_sync/score_mod.cuh"
#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/spec.cuh"
#include "attention/backward/mma_sync/stream.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "device/reduce.cuh"

namespace flashmoe::attention::backward::mma_sync {

// The statistics of a thread's rows.
template <typename Spec, MaskKind kMask>
struct RowStatistics {
  float lse_log2[Spec::kMmaM][2];  // +inf if P is to be zero
  float row_dot[Spec::kMmaM][2];

  // Computes row_dot from global memory: each lane of a row's quad sums every fourth chunk of 16 bytes. The first of
  // the sharing warps stores it for the dk, dv kernel.
  __device__ __forceinline__ RowStatistics(const BackwardParams& params, const MaskTile<kMask>& tile,
                                           const WarpCoordinates<Spec>& warp) {
    using Element = typename Spec::Element;
    const int lane = ptx::lane_index();
    const Element* out_head = static_cast<const Element*>(params.out) + row_offset(params.out_stride, tile, tile.head);
    const Element* dout_head =
        static_cast<const Element*>(params.dout) + row_offset(params.dout_stride, tile, tile.head);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = tile.row + warp.first_row() + m * 16 + half * 8 + lane / 4;
        const bool is_inside = row < lengths_of(params, tile).rows();
        const int64_t at = first_statistic(params, tile, tile.head) + row;
        const Element* out_gmem = out_head + row * params.out_stride.row;
        const Element* dout_gmem = dout_head + row * params.dout_stride.row;
        float sum = 0.0f;
#pragma unroll
        for (int column = lane % 4 * kChunkElements; column < Spec::kHeadDim; column += 4 * kChunkElements) {
          uint32_t out[4] = {0, 0, 0, 0};
          uint32_t dout[4] = {0, 0, 0, 0};
          if (is_inside && column < value_columns<kMask>(params)) {
            ptx::ld_global_128(out, out_gmem + column);
            ptx::ld_global_128(dout, dout_gmem + column);
          }
#pragma unroll
          for (int w = 0; w < 4; ++w) {
            const float2 a = unpack<Element>(out[w]);
            const float2 b = unpack<Element>(dout[w]);
            sum = ptx::fma_rn(a.x, b.x, sum);
            sum = ptx::fma_rn(a.y, b.y, sum);
          }
        }
        const float lse = is_inside ? ptx::ld_global_float(params.lse + at) : ptx::negative_infinity();
        sum = quad_sum(sum);
        if (is_inside && params.dlse != nullptr) sum -= ptx::ld_global_float(params.dlse + at);
        row_dot[m][half] = lse == ptx::negative_infinity() ? 0.0f : sum;
        lse_log2[m][half] = in_base_2(lse);
        if (row < row_room(params, tile) && lane % 4 == 0 && warp.slice == 0) {
          ptx::st_global_float(params.row_dot + at, row_dot[m][half]);
        }
      }
  }
};

// Turns scores into P. Masked ones are set to zero after the exponential: a key past the end scores 0, and
// exp2(0 - lse) may be anything up to inf. `first_key`: of the warp's slice of the block; `row`: the warp's first.
// kIsFull: none is masked.
template <typename Spec, MaskKind kMask, bool kIsFull>
__device__ __forceinline__ void query_weights(const BackwardParams& params, Scores<Spec>& scores,
                                              const RowStatistics<Spec, kMask>& rows, const MaskTile<kMask>& tile,
                                              int row, int first_key) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[m][n][i] = ptx::exp2_approx(ptx::fma_rn(scores[m][n][i], params.scale_log2, -rows.lse_log2[m][i / 2]));
  if constexpr (kIsFull) return;
  const auto& lengths = lengths_of(params, tile);
  if (visible_keys<kMask>(params, lengths, row).end - first_key >= Spec::kWarpStreamRows &&
      (kMask != MaskKind::kRuntime ||
       visible_keys<kMask>(params, lengths, row + Spec::kWarpRows - 1).begin <= first_key)) {
    return;
  }
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange visible = visible_keys<kMask>(params, lengths, row + m * 16 + half * 8 + lane / 4);
      const int begin = visible.begin - first_key - lane % 4 * 2;
      const int end = visible.end - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i >= end) scores[m][n][2 * half + i] = 0.0f;
      if (kMask == MaskKind::kRuntime && has_left_end(params)) {
#pragma unroll
        for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (n * 8 + i < begin) scores[m][n][2 * half + i] = 0.0f;
      }
    }
}

// Turns dP into dS, as a left operand. scores: P.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void score_gradients(Operand<Spec>& dS, Scores<Spec>& gradients, const Scores<Spec>& scores,
                                                const RowStatistics<Spec, kMask>& rows) {
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) gradients[m][n][i] = scores[m][n][i] * (gradients[m][n][i] - rows.row_dot[m][i / 2]);
  make_operand<Spec>(dS, gradients);
}

// dQ += dS K.
template <typename Spec>
__device__ __forceinline__ void add_products(Gradient<Spec>& dQ, const Operand<Spec>& dS,
                                             const GroupOperand<Spec>& shared, const WarpCoordinates<Spec>& warp,
                                             ptx::SmemPointer K_smem) {
  if constexpr (Spec::kSharers > 1) {
    shared.store(warp, dS);
    // Hazard: a warp reads the other's half of dS before it is written. (It is overwritten one block later, after the
    // stream's barrier.)
    ptx::named_barrier_sync(1 + warp.group, Spec::kSharers * 32);
  }
  accumulate<Spec>(dQ, dS, shared, K_smem + warp.column_offset());
}

// Varlen: dQ += dS K for one block. row: the group's first; is_seen: some of its rows see some of the block.
template <typename Spec, typename Stream, bool kIsFull>
__device__ __forceinline__ void add_keys(const BackwardParams& params, Gradient<Spec>& dQ, Stream& stream,
                                         const QueryOperand<Spec>& Q, const QueryOperand<Spec>& dO,
                                         const RowStatistics<Spec, MaskKind::kRuntime>& rows, const VarlenTile& tile,
                                         const WarpCoordinates<Spec>& warp, const GroupOperand<Spec>& shared,
                                         const TileDropout<Spec>& dropout, int row, int block, bool is_seen) {
  const int block_key = block * Spec::kStreamRows;
  Scores<Spec> gradients;  // dP, then dS
  Scores<Spec> scores;
  stream.wait_second();
  if (is_seen) multiply_query_key<Spec>(gradients, dO, stream.second() + warp.row_offset());
  if constexpr (Spec::kHasDropout) {
    if (is_seen) dropout.drop(gradients, row, block_key);
  }
  stream.wait_first();
  if (is_seen) {
    ScoreModWeights<Spec> score_mod;
    if constexpr (Spec::kHasScoreMod) score_mod.load_mask(params, tile, tile.head, row, block_key);
    multiply_query_key<Spec>(scores, Q, stream.first() + warp.row_offset());
    if constexpr (Spec::kHasScoreMod) {
      score_mod.weigh_keys(params, scores, rows.lse_log2, tile, row, block_key);
    } else {
      query_weights<Spec, MaskKind::kRuntime, kIsFull>(params, scores, rows, tile, row,
                                                       block_key + warp.slice * Spec::kWarpStreamRows);
    }
    Operand<Spec> dS;
    score_gradients<Spec, MaskKind::kRuntime>(dS, gradients, scores, rows);
    add_products<Spec>(dQ, dS, shared, warp, stream.first());
  }
  stream.advance();
}

// smem: Q [kOwnRows, kHeadDim], dO, then the layout in Spec. Returns false if this block has no tile.
template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ bool sum_over_keys(const BackwardParams& params, Gradient<Spec>& dQ, ptx::SmemPointer smem) {
  using Element = typename Spec::Element;
  const WarpCoordinates<Spec> warp(ptx::warp_index());
  const MaskTile<kMask> tile = locate_tile<Spec, kMask>(params);
  if constexpr (kMask == MaskKind::kRuntime) {
    if (tile.batch < 0) {
      if (tile.batch == kClearsStrays) clear_unowned_rows<Spec>(params, tile);
      return false;
    }
  }
  store_tile<Spec, kMask>(smem, tile);
  const StreamRange range = stream_range<Spec, kMask>(params, tile);
  Stream stream(params, tile, range, smem);
  const int num_rows = lengths_of(params, tile).rows();
  Stream::load_own(smem, static_cast<const Element*>(params.q) + row_offset(params.q_stride, tile, tile.head),
                   params.q_stride.row, tile.row, num_rows, params.head_dim);
  Stream::load_own(smem + Spec::kOwnBytes,
                   static_cast<const Element*>(params.dout) + row_offset(params.dout_stride, tile, tile.head),
                   params.dout_stride.row, tile.row, num_rows, value_columns<kMask>(params));
  stream.start();
  const RowStatistics<Spec, kMask> rows(params, tile, warp);
  const ptx::SmemPointer own_smem = smem + warp.first_row() * Spec::kRowBytes;
  if constexpr (Spec::kQueryInRegisters) stream.wait_own();
  const QueryOperand<Spec> Q(own_smem);
  const QueryOperand<Spec> dO(own_smem + Spec::kOwnBytes);
  const GroupOperand<Spec> shared(smem, warp, 0);
  const int row = tile.row + warp.first_row();
  const TileDropout<Spec> dropout(params, tile);
  clear<Spec>(dQ);
  if constexpr (kMask == MaskKind::kRuntime) {
    // Blocks without a mask have their own loop inside the loop of the others, which are on both sides of them.
    const KeyRange full = Spec::kHasScoreMod ? KeyRange{0, 0} : full_blocks<Spec>(params, tile);
    for (int block = range.end - 1; block >= range.begin; --block) {
      if constexpr (!Spec::kHasScoreMod) {
        for (; block >= full.begin && block < full.end; --block) {
          add_keys<Spec, Stream, true>(params, dQ, stream, Q, dO, rows, tile, warp, shared, dropout, row, block, true);
        }
        if (block < range.begin) break;
      }
      const KeyRange seen = seen_blocks<Spec>(params, tile, ptx::recompute(row));
      add_keys<Spec, Stream, false>(params, dQ, stream, Q, dO, rows, tile, warp, shared, dropout, row, block,
                                    block >= seen.begin && block < seen.end);
    }
  } else {
    // Does not call add_keys: the machine code for D=128 and 256 would change.
    for (int block = range.end - 1; block >= range.begin; --block) {
      const int block_key = block * Spec::kStreamRows;
      // Decided by the group's last row, which sees the block if any row does. A group that sees nothing of the block
      // only joins the barriers.
      const bool is_seen =
          kMask != MaskKind::kCausal || block_key <= diagonal_key(Lengths{params}, row + Spec::kWarpRows - 1);
      Scores<Spec> gradients;  // dP, then dS
      Scores<Spec> scores;
      stream.wait_second();
      if (is_seen) multiply_query_key<Spec>(gradients, dO, stream.second() + warp.row_offset());
      stream.wait_first();
      if (is_seen) {
        multiply_query_key<Spec>(scores, Q, stream.first() + warp.row_offset());
        query_weights<Spec, kMask, false>(params, scores, rows, tile, row,
                                          block_key + warp.slice * Spec::kWarpStreamRows);
        Operand<Spec> dS;
        score_gradients<Spec, kMask>(dS, gradients, scores, rows);
        add_products<Spec>(dQ, dS, shared, warp, stream.first());
      }
      stream.advance();
    }
  }
  stream.finish();
  return true;
}

template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ void query_gradient(const BackwardParams& params) {
  const ptx::SmemPointer smem = ptx::dynamic_shared_memory();
  Gradient<Spec> dQ;
  if (!sum_over_keys<Spec, Stream, kMask>(params, dQ, smem)) return;
  // The tile is located again, or was saved: no register holds through the loop what only the epilogue needs.
  const MaskTile<kMask> tile = end_tile<Spec, kMask>(params, smem);
  const WarpCoordinates<Spec> warp(ptx::recompute(ptx::warp_index()));
  const int row = tile.row + warp.first_row();
  // Hazard: dQ overwrites Q while a sharing warp still multiplies with it, or while Q is still being loaded.
  ptx::barrier_sync_block();
  store_gradient<Spec>(
      params.dq, params.dq_stride, row_offset(params.dq_stride, tile, tile.head) + row * params.dq_stride.row,
      row_room(params, tile) - row, params.head_dim, warp, dQ, params.scale, smem + warp.first_row() * Spec::kRowBytes);
}

}  // namespace flashmoe::attention::backward::mma_sync
