// The kernel of dk and dv. A thread block owns kOwnRows keys; Q and dO of every head of the group stream past, head by
// head, in each from the last block down to the first with a query that sees a key. It runs after the dq kernel, which
// writes row_dot. The heads of a group are summed in registers, in order.
//
// With one role a warp computes both gradients of its keys. At D=64 they fit its registers for 32 keys.
//
// With two roles, a warp of the first computes S^T = K Q^T, P^T, dV += P^T dO; a warp of the second dP^T = V dO^T,
// dS^T, dK += dS^T Q. Both run the same code, with Q and dO exchanged. Each holds only one gradient, so there are
// registers for 32 keys, and a fragment of the stream is read half as often as by a warp that computes both. P^T passes
// from one role to the other in shared memory.
#pragma once

#include "attention/backward/mma_sync/dropout.cuh"
#include "attention/backward/mma_sync/score_mod.cuh"
#include "attention/backward/mma_sync/products.cuh"
#include "attention/backward/mma_sync/spec.cuh"
#include "attention/backward/mma_sync/stream.cuh"
#include "attention/backward/mma_sync/tile.cuh"
#include "ptx/shuffle.cuh"

namespace flashmoe::attention::backward::mma_sync {

// The shuffle tells the compiler that the index, and so the role, is the same in the whole warp.
__device__ __forceinline__ int warp_of_block() { return ptx::shuffle_index(ptx::recompute(ptx::warp_index()), 0); }

// Two statistics, those of columns 8 n + 2 * (lane % 4) and the next one in a warp's slice.
__device__ __forceinline__ void load_columns(float (&columns)[2], ptx::SmemPointer slice_smem, int n) {
  uint32_t bits[2];
  ptx::ld_shared_64(bits, slice_smem + (n * 32 + ptx::lane_index() % 4 * 8));
  columns[0] = __uint_as_float(bits[0]);
  columns[1] = __uint_as_float(bits[1]);
}

// Whether all keys of a warp are seen up to the last query of its slice of a block. Keys past the last are seen by
// none.
template <typename Spec>
__device__ __forceinline__ bool is_whole_end(const BackwardParams& params, const VarlenTile& tile, int key,
                                             int first_row) {
  return key + Spec::kWarpRows <= tile.extents.keys() &&
         visible_rows<MaskKind::kRuntime>(params, tile.extents, key).end >= first_row + Spec::kWarpStreamRows;
}

template <typename Spec>
__device__ __forceinline__ bool is_whole_end(const BackwardParams&, const DenseTile&, int, int) {
  return true;
}

// Turns scores (S^T) into P^T. The log-sum-exp of a column is +inf if the query is past the end or sees no key. `key`:
// the warp's first; `first_row`: the first query of the warp's slice of the block. Keys past the end only affect their
// own rows, which are never stored. kIsFull: none is masked.
template <typename Spec, MaskKind kMask, bool kIsFull>
__device__ __forceinline__ void key_weights(const BackwardParams& params, Scores<Spec>& scores,
                                            ptx::SmemPointer lse_smem, const MaskTile<kMask>& tile, int key,
                                            int first_row) {
#pragma unroll
  for (int n = 0; n < Spec::kMmaN; ++n) {
    float lse_log2[2];
    load_columns(lse_log2, lse_smem, n);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        scores[m][n][i] = ptx::exp2_approx(ptx::fma_rn(scores[m][n][i], params.scale_log2, -lse_log2[i % 2]));
  }
  if constexpr (kIsFull) return;
  const auto& lengths = lengths_of(params, tile);
  if (kMask == MaskKind::kFull || (visible_rows<kMask>(params, lengths, key + Spec::kWarpRows - 1).begin <= first_row &&
                                   is_whole_end<Spec>(params, tile, key, first_row))) {
    return;
  }
  const int lane = ptx::lane_index();
#pragma unroll
  for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The leading columns that do not see this thread's key, counted from the thread's first column.
      const KeyRange visible = visible_rows<kMask>(params, lengths, key + m * 16 + half * 8 + lane / 4);
      const int unseen = visible.begin - first_row - lane % 4 * 2;
      const int end = visible.end - first_row - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < Spec::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (n * 8 + i < unseen || (kMask == MaskKind::kRuntime && n * 8 + i >= end))
            scores[m][n][2 * half + i] = 0.0f;
    }
}

// Turns scores into P^T, packed, and the scores themselves into the factor of dP - row_dot in dS^T, which differs from
// P^T under score modification.
template <typename Spec, MaskKind kMask, bool kIsFull>
__device__ __forceinline__ void weigh_keys(const BackwardParams& params, Scores<Spec>& scores, Operand<Spec>& operand,
                                           const ScoreModWeights<Spec>& score_mod, ptx::SmemPointer lse_smem,
                                           const MaskTile<kMask>& tile, int key, int first_row) {
  if constexpr (Spec::kHasScoreMod) {
    float lse_log2[Spec::kMmaN][2];
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n) load_columns(lse_log2[n], lse_smem, n);
    score_mod.apply_softmax_rows(params, scores, operand, lse_log2, tile, key, first_row);
  } else {
    key_weights<Spec, kMask, kIsFull>(params, scores, lse_smem, tile, key, first_row);
    make_operand<Spec>(operand, scores);
  }
}

// Turns dP^T into dS^T, as a left operand.
template <typename Spec>
__device__ __forceinline__ void score_gradients(Operand<Spec>& dS, Scores<Spec>& gradients, const GroupOperand<Spec>& P,
                                                const WarpCoordinates<Spec>& warp, ptx::SmemPointer row_dot_smem) {
  using Element = typename Spec::Element;
#pragma unroll
  for (int step = 0; step < Spec::kMmaN / 2; ++step) {
    float row_dot[2][2];
    load_columns(row_dot[0], row_dot_smem, 2 * step);
    load_columns(row_dot[1], row_dot_smem, 2 * step + 1);
#pragma unroll
    for (int m = 0; m < Spec::kMmaM; ++m) {
      uint32_t weights[4];
      ptx::ld_shared_128(weights, P.at(warp.slice * (Spec::kMmaN / 2) + step, m));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 p = unpack<Element>(weights[i]);
        const float* d = &gradients[m][2 * step + i / 2][i % 2 * 2];
        dS[step][m][i] = pack<Element>(p.x * (d[0] - row_dot[i / 2][0]), p.y * (d[1] - row_dot[i / 2][1]));
      }
    }
  }
}

// Starts the copies of K and V.
template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ void load_key_rows(const BackwardParams& params, const MaskTile<kMask>& tile,
                                              ptx::SmemPointer smem) {
  using Element = typename Spec::Element;
  const int keys = lengths_of(params, tile).keys();
  Stream::load_own(smem, static_cast<const Element*>(params.k) + key_offset(params.k_stride, tile, tile.head),
                   params.k_stride.row, tile.row, keys, params.head_dim);
  Stream::load_own(smem + Spec::kOwnBytes,
                   static_cast<const Element*>(params.v) + key_offset(params.v_stride, tile, tile.head),
                   params.v_stride.row, tile.row, keys, value_columns<kMask>(params));
}

// gradient: dV, or dK. smem: K [kOwnRows, kHeadDim], V, then the layout in Spec. Returns false if this block has no
// tile.
template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ bool sum_over_queries(const BackwardParams& params, Gradient<Spec>& gradient,
                                                 ptx::SmemPointer smem) {
  const WarpCoordinates<Spec> warp(warp_of_block());
  const bool is_value = warp.role == 0;
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
  load_key_rows<Spec, Stream, kMask>(params, tile, smem);
  stream.start();
  const ptx::SmemPointer own_smem = smem + ((is_value ? 0 : Spec::kOwnBytes) + warp.first_row() * Spec::kRowBytes);
  if constexpr (Spec::kQueryInRegisters) stream.wait_own();
  const QueryOperand<Spec> own(own_smem);
  const GroupOperand<Spec> P(smem, warp, 0);
  const GroupOperand<Spec> shared(smem, warp, is_value ? 0 : Spec::kNumOperands - 1);  // P, or dS
  const int key = tile.row + warp.first_row();
  const TileDropout<Spec> dropout(params, tile);
  // The first query that sees a key of the group. Varlen kernels do not skip blocks.
  const int group_row =
      kMask == MaskKind::kRuntime ? 0 : visible_rows<kMask>(params, lengths_of(params, tile), key).begin;
  constexpr int kGroupThreads = 2 * Spec::kSharers * 32;
  clear<Spec>(gradient);
  int block = range.end - 1;
  int head = range.head;
  for (int left = (range.end_head - range.head) * (range.end - range.begin); left > 0; --left) {
    stream.wait_second();
    const int block_row = block * Spec::kStreamRows;
    if (group_row < block_row + Spec::kStreamRows) {
      const ptx::SmemPointer Q_smem = stream.first();
      const ptx::SmemPointer dO_smem = stream.second();
      const ptx::SmemPointer statistics = stream.current_statistics() + warp.slice * Spec::kWarpStreamRows * 4;
      const int slice_row = block_row + warp.slice * Spec::kWarpStreamRows;
      ScoreModWeights<Spec> score_mod;
      if constexpr (Spec::kHasScoreMod) {
        if (is_value) score_mod.load_mask(params, tile, head, key, slice_row);
      }
      Scores<Spec> scores;  // S^T, or dP^T
      multiply_query_key<Spec>(scores, own, (is_value ? Q_smem : dO_smem) + warp.row_offset());
      Operand<Spec> operand;
      if (is_value) {
        weigh_keys<Spec, kMask, false>(params, scores, operand, score_mod, statistics, tile, key, slice_row);
        if constexpr (Spec::kHasScoreMod) {
          Operand<Spec> score_operand;  // the factor of dP - row_dot in dS
          make_operand<Spec>(score_operand, scores);
          P.store(warp, score_operand);
        } else {
          P.store(warp, operand);
        }
        if constexpr (Spec::kHasDropout) {
          dropout.visit_keys(head, key, slice_row, [&](int m, int n, int half, KeptPair pair) {
            dropout.drop_weights(operand, m, n, half, pair);
          });
        }
        // Hazard: P is read before it is written. (It is overwritten one block later, after the stream's barrier.)
        if constexpr (Spec::kSharers == 1) {
          ptx::named_barrier_arrive(1 + warp.group, kGroupThreads);
        } else {
          ptx::named_barrier_sync(1 + warp.group, kGroupThreads);
        }
      } else {
        if constexpr (Spec::kHasDropout) {
          dropout.visit_keys(head, key, slice_row, [&](int m, int n, int half, KeptPair pair) {
            dropout.drop_gradient(scores[m][n], half, pair);
          });
        }
        ptx::named_barrier_sync(1 + warp.group, kGroupThreads);  // P has been written
        score_gradients<Spec>(operand, scores, P, warp, statistics + Spec::kStreamRows * 4);
        if constexpr (Spec::kSharers > 1) {
          shared.store(warp, operand);
          // Hazard: a warp reads the other's half of dS before it is written.
          ptx::named_barrier_sync(1 + Spec::kNumGroups + warp.group, Spec::kSharers * 32);
        }
      }
      accumulate<Spec>(gradient, operand, shared, (is_value ? dO_smem : Q_smem) + warp.column_offset());
    }
    stream.advance();
    if (--block < range.begin) {
      block = range.end - 1;
      ++head;
    }
  }
  stream.finish();
  return true;
}

// dK and dV from one block. key: the warp's first; is_seen (varlen): some query of the block sees some of its keys.
template <typename Spec, typename Stream, MaskKind kMask, bool kIsFull>
__device__ __forceinline__ void add_queries(const BackwardParams& params, Gradient<Spec>& dK, Gradient<Spec>& dV,
                                            Stream& stream, const QueryOperand<Spec>& K, const QueryOperand<Spec>& V,
                                            const MaskTile<kMask>& tile, const GroupOperand<Spec>& unshared,
                                            const TileDropout<Spec>& dropout, int key, int head, int block,
                                            bool is_seen) {
  stream.wait_second();
  const int block_row = block * Spec::kStreamRows;
  if (kMask == MaskKind::kRuntime
          ? is_seen
          : kMask != MaskKind::kCausal ||
                diagonal_row(Lengths{params}, key) < block_row + Spec::kStreamRows) {  // otherwise no key is seen
    const ptx::SmemPointer Q_smem = stream.first();
    const ptx::SmemPointer dO_smem = stream.second();
    Scores<Spec> scores;     // S^T, then P^T
    Scores<Spec> gradients;  // dP^T, then dS^T
    Operand<Spec> operand;
    ScoreModWeights<Spec> score_mod;
    if constexpr (Spec::kHasScoreMod) score_mod.load_mask(params, tile, head, key, block_row);
    multiply_query_key<Spec>(scores, K, Q_smem);
    multiply_query_key<Spec>(gradients, V, dO_smem);
    weigh_keys<Spec, kMask, kIsFull>(params, scores, operand, score_mod, stream.current_statistics(), tile, key,
                                     block_row);
    if constexpr (Spec::kHasDropout) {
      dropout.visit_keys(head, key, block_row, [&](int m, int n, int half, KeptPair pair) {
        dropout.drop_weights(operand, m, n, half, pair);
        dropout.drop_gradient(gradients[m][n], half, pair);
      });
    }
    accumulate<Spec>(dV, operand, unshared, dO_smem);
#pragma unroll
    for (int n = 0; n < Spec::kMmaN; ++n) {
      float row_dot[2];
      load_columns(row_dot, stream.current_statistics() + Spec::kStreamRows * 4, n);
#pragma unroll
      for (int m = 0; m < Spec::kMmaM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) gradients[m][n][i] = scores[m][n][i] * (gradients[m][n][i] - row_dot[i % 2]);
    }
    make_operand<Spec>(operand, gradients);
    accumulate<Spec>(dK, operand, unshared, Q_smem);
  }
  stream.advance();
}

// One role: a warp computes both gradients of its keys, and P^T and dS^T stay in its registers.
template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ bool sum_both_over_queries(const BackwardParams& params, Gradient<Spec>& dK,
                                                      Gradient<Spec>& dV, ptx::SmemPointer smem) {
  static_assert(Spec::kSharers == 1, "P and dS do not leave the warp");
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
  load_key_rows<Spec, Stream, kMask>(params, tile, smem);
  stream.start();
  const ptx::SmemPointer own_smem = smem + warp.first_row() * Spec::kRowBytes;
  if constexpr (Spec::kQueryInRegisters) stream.wait_own();
  const QueryOperand<Spec> K(own_smem);
  const QueryOperand<Spec> V(own_smem + Spec::kOwnBytes);
  const GroupOperand<Spec> unshared(smem, warp, 0);
  const int key = tile.row + warp.first_row();
  const TileDropout<Spec> dropout(params, tile);
  clear<Spec>(dK);
  clear<Spec>(dV);
  int block = range.end - 1;
  int head = range.head;
  int left = (range.end_head - range.head) * (range.end - range.begin);
  const auto next = [&] {
    --left;
    if (--block < range.begin) {
      block = range.end - 1;
      ++head;
    }
  };
  if constexpr (kMask == MaskKind::kRuntime && !Spec::kHasScoreMod) {
    // Blocks without a mask have their own loop, as in the dq kernel.
    const KeyRange full = full_blocks<Spec>(params, tile);
    for (; left > 0; next()) {
      for (; left > 0 && block >= full.begin && block < full.end; next()) {
        add_queries<Spec, Stream, kMask, true>(params, dK, dV, stream, K, V, tile, unshared, dropout, key, head, block,
                                               true);
      }
      if (left <= 0) break;
      const KeyRange seen = seen_blocks<Spec>(params, tile, ptx::recompute(key));
      add_queries<Spec, Stream, kMask, false>(params, dK, dV, stream, K, V, tile, unshared, dropout, key, head, block,
                                              block >= seen.begin && block < seen.end);
    }
  } else {
    for (; left > 0; next()) {
      add_queries<Spec, Stream, kMask, false>(params, dK, dV, stream, K, V, tile, unshared, dropout, key, head, block,
                                              true);
    }
  }
  stream.finish();
  return true;
}

// Stores through the shared memory of the group's own rows.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void store_key_rows(const BackwardParams& params, const MaskTile<kMask>& tile,
                                               const WarpCoordinates<Spec>& warp, bool is_value,
                                               const Gradient<Spec>& gradient, ptx::SmemPointer smem) {
  const int key = tile.row + warp.first_row();
  const Strides& stride = is_value ? params.dv_stride : params.dk_stride;
  float value_scale = 1.0f;
  if constexpr (Spec::kHasDropout) value_scale = dropout_of(params).scale;
  store_gradient<Spec>(is_value ? params.dv : params.dk, stride, key_offset(stride, tile, tile.head) + key * stride.row,
                       key_room(params, tile) - key, is_value ? value_columns<kMask>(params) : params.head_dim, warp,
                       gradient, is_value ? value_scale : params.scale, smem + warp.first_row() * Spec::kRowBytes);
}

template <typename Spec, typename Stream, MaskKind kMask>
__device__ __forceinline__ void key_value_gradient(const BackwardParams& params) {
  const ptx::SmemPointer smem = ptx::dynamic_shared_memory();
  // Everything is located again for the epilogue: no register holds it through the loop.
  if constexpr (Spec::kRoles == 1) {
    Gradient<Spec> dK;
    Gradient<Spec> dV;
    if (!sum_both_over_queries<Spec, Stream, kMask>(params, dK, dV, smem)) return;
    const MaskTile<kMask> tile = end_tile<Spec, kMask>(params, smem);
    const WarpCoordinates<Spec> warp(ptx::recompute(ptx::warp_index()));
    ptx::warp_sync();  // Hazard: a gradient overwrites K or V while another lane of the warp still reads it.
    // Hazard: the same while K or V is still being loaded: keys that no query sees have no block, and so no barrier.
    if constexpr (kMask == MaskKind::kRuntime) ptx::barrier_sync_block();
    store_key_rows<Spec, kMask>(params, tile, warp, /*is_value=*/true, dV, smem + Spec::kOwnBytes);
    store_key_rows<Spec, kMask>(params, tile, warp, /*is_value=*/false, dK, smem);
  } else {
    Gradient<Spec> gradient;
    if (!sum_over_queries<Spec, Stream, kMask>(params, gradient, smem)) return;
    const MaskTile<kMask> tile = end_tile<Spec, kMask>(params, smem);
    const WarpCoordinates<Spec> warp(warp_of_block());
    const bool is_value = warp.role == 0;
    // Hazard: a gradient overwrites K or V while a sharing warp still multiplies with it.
    ptx::barrier_sync_block();
    store_key_rows<Spec, kMask>(params, tile, warp, is_value, gradient, smem + (is_value ? 0 : Spec::kOwnBytes));
  }
}

}  // namespace flashmoe::attention::backward::mma_sync
