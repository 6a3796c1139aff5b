// Flash attention forward for Turing: mma.m16n8k8, no cp.async, 64 KiB of shared memory, fp16 only.
//
// Divides the work and orders the key tiles as the sm_80 family does (attention/forward/sm80/forward.cuh), but tiles
// pass through registers on their way to shared memory.
#pragma once

#include "attention/forward/mma_sync/accumulate.cuh"
#include "attention/forward/mma_sync/epilogue.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/forward/sm75/load.cuh"
#include "attention/forward/sm75/spec.cuh"
#include "attention/forward/tile.cuh"
#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm75 {

using mma_sync::Accumulator;
using mma_sync::QueryOperand;

template <typename Spec, MaskKind kMask>
struct KeyTileWalk {
  using Element = typename Spec::Element;

  const ForwardParams& params;
  const Sequence<kMask> sequence;
  const ptx::SmemPointer K_smem;  // [kBlockN, kHeadDim]
  const ptx::SmemPointer V_smem;  // [kBlockN, kHeadDim]
  const Element* K_gmem;          // [seq_k, head_dim] of this head
  const Element* V_gmem;
  int n;                  // the current key tile
  const int causal_last;  // last key that the warp's first row sees, if causal; kRuntime: the window's key (masks.cuh)
  const QueryTile tile;   // kRuntime only
  const mma_sync::WalkDropout<Spec> dropout;

  __device__ __forceinline__ KeyTileWalk(const Sequence<kMask>& sequence_, const QueryTile& tile_, int first_tile,
                                         ptx::SmemPointer KV_smem)
      : params(sequence_.params),
        sequence(sequence_),
        K_smem(KV_smem),
        V_smem(KV_smem + Spec::kKeyBytes),
        K_gmem(static_cast<const Element*>(params.k) + sequence.key_offset(params.k_stride, tile_.head_kv)),
        V_gmem(static_cast<const Element*>(params.v) + sequence.key_offset(params.v_stride, tile_.head_kv)),
        n(first_tile),
        causal_last(Mask<kMask>(sequence).last_key(tile_.row + ptx::warp_index() * Spec::kWarpRows)),
        tile(tile_),
        dropout(sequence.params, tile_) {}

  // Fetches key tile `index` of K or V.
  __device__ __forceinline__ void fetch(StagedTile<Spec, Spec::kBlockN>& staged, const Element* head_gmem,
                                        const Strides& stride, int columns, int index) const {
    const int first_key = index * Spec::kBlockN;
    if constexpr (kMask == MaskKind::kRuntime) {
      staged.fetch_varlen(head_gmem, stride, columns, sequence, first_key,
                          Mask<kMask>(sequence).keys(tile.row, tile.rows));
    } else {
      staged.fetch(head_gmem + first_key * stride.row, stride.row, columns, sequence.keys() - first_key);
    }
  }
  __device__ __forceinline__ void fetch_key(StagedTile<Spec, Spec::kBlockN>& staged, int index) const {
    fetch(staged, K_gmem, params.k_stride, params.head_dim, index);
  }

  // On entry K of this tile has been stored, but not yet waited for.
  template <bool kIsMasked>
  __device__ __forceinline__ void step(Accumulator<Spec>& accumulator, const QueryOperand<Spec>& Q, int end) {
    const int first_key = n * Spec::kBlockN;
    float S_rmem[Spec::kMmaM][Spec::kMmaN][4];
    {
      StagedTile<Spec, Spec::kBlockN> V_staged;
      fetch(V_staged, V_gmem, params.v_stride, value_columns<kMask>(params), n);
      ptx::barrier_sync_block();  // K of this tile is complete; all warps are done with V of the previous tile
      mma_sync::multiply_query_key<Spec>(S_rmem, Q, K_smem);
      V_staged.store(V_smem);
    }
    ptx::barrier_sync_block();  // V of this tile is complete; all warps are done with K
    if constexpr (kMask == MaskKind::kRuntime) {
      mma_sync::shape_scores<Spec>(S_rmem, sequence, tile.head_q, tile.row + ptx::warp_index() * Spec::kWarpRows,
                                   first_key);
    }
    if constexpr (kIsMasked) {
      const TileMask<kMask> mask = tile_mask<kMask>(sequence, causal_last, first_key);
      mma_sync::mask_scores<Spec>(S_rmem, ptx::lane_index(), mask);
    }
    StagedTile<Spec, Spec::kBlockN> K_staged;
    if (n + 1 < end) fetch_key(K_staged, n + 1);
    if constexpr (Spec::kHasDropout) {
      mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, V_smem, params.scale_log2, kIsMasked, dropout,
                                      tile.row + ptx::warp_index() * Spec::kWarpRows, first_key);
    } else {
      mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, V_smem, params.scale_log2, kIsMasked);
    }
    if (n + 1 < end) K_staged.store(K_smem);
  }
};

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void attend(const ForwardParams& params, Accumulator<Spec>& accumulator,
                                       ptx::SmemPointer Q_smem, int warp_row) {
  const QueryTile tile = locate_query_tile<Spec::kBlockM, Spec::kHeadDim, kMask, false>(params);
  const Sequence<kMask> sequence = sequence_of<kMask>(params, tile);
  if (kMask == MaskKind::kRuntime && tile.rows <= 0) return;
  const KeyTiles key_tiles = key_tiles_of<Spec::kBlockN, kMask, false>(sequence, tile);
  if (key_tiles.end == 0 || (kMask == MaskKind::kRuntime && key_tiles.begin >= key_tiles.end)) return;
  KeyTileWalk<Spec, kMask> walk(sequence, tile, key_tiles.begin, Q_smem + Spec::kQueryBytes);
  {
    StagedTile<Spec, Spec::kBlockN> K_staged;
    walk.fetch_key(K_staged, walk.n);
    StagedTile<Spec, Spec::kBlockM> Q_staged;
    Q_staged.fetch(static_cast<const typename Spec::Element*>(params.q) +
                       walk.sequence.row_offset(params.q_stride, tile.head_q) + tile.row * params.q_stride.row,
                   params.q_stride.row, params.head_dim, tile.rows);
    K_staged.store(walk.K_smem);
    Q_staged.store(Q_smem);
  }
  ptx::barrier_sync_block();  // Q is complete
  const QueryOperand<Spec> Q(Q_smem + warp_row * Spec::kRowBytes);
  if constexpr (kMask == MaskKind::kRuntime) {
    for (; walk.n < key_tiles.end; ++walk.n) walk.template step<true>(accumulator, Q, key_tiles.end);
  } else {
    for (; walk.n < key_tiles.full_end; ++walk.n) walk.template step<false>(accumulator, Q, key_tiles.end);
    for (; walk.n < key_tiles.end; ++walk.n) walk.template step<true>(accumulator, Q, key_tiles.end);
  }
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  const ptx::SmemPointer Q_smem = ptx::dynamic_shared_memory();  // [kBlockM, kHeadDim]
  const int warp_row = ptx::warp_index() * Spec::kWarpRows;
  Accumulator<Spec> accumulator;
  attend<Spec, kMask>(params, accumulator, Q_smem, warp_row);
  const QueryTile tile = locate_query_tile<Spec::kBlockM, Spec::kHeadDim, kMask, false>(params);
  if (kMask == MaskKind::kRuntime && tile.rows <= 0) return;
  mma_sync::finish_tile<Spec, kMask>(params, tile, warp_row, ptx::lane_index(), accumulator.rows, accumulator.O_rmem,
                                     Q_smem + warp_row * Spec::kRowBytes);
}

// Ragged and paged batches, with ScoreOptions.
template <typename Spec>
__device__ __forceinline__ void forward_varlen(const ForwardParams& params) {
  forward<Spec, MaskKind::kRuntime>(params);
}

template <typename Spec>
__device__ __forceinline__ void forward_dropout(const DropoutForwardParams& params) {
  static_assert(Spec::kHasDropout, "kernels without dropout take ForwardParams");
  forward<Spec, MaskKind::kRuntime>(params.forward);
}

}  // namespace flashmoe::attention::sm75
