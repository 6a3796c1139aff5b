// Flash attention forward for Turing: mma.m16n8k8, no cp.async, 64 KiB of shared memory, fp16 only.
//
// The same division of work and the same order of key tiles as the sm_80 family (attention/forward/sm80/forward.cuh); tiles pass
// through registers on their way to shared memory.
#pragma once

#include "attention/forward/mma_sync/accumulate.cuh"
#include "attention/forward/mma_sync/epilogue.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/params/forward.h"
#include "attention/forward/sm75/load.cuh"
#include "attention/forward/sm75/spec.cuh"
#include "attention/forward/tile.cuh"
#include "ptx/barrier.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace sm75 {

using mma_sync::Accumulator;
using mma_sync::QueryOperand;

template <typename Spec>
struct KeyTileWalk {
  using Element = typename Spec::Element;

  const ForwardParams& params;
  const ptx::SmemPointer K_smem;  // [kBlockN, kHeadDim]
  const ptx::SmemPointer V_smem;  // [kBlockN, kHeadDim]
  const Element* K_gmem;          // [seq_k, head_dim] of this head
  const Element* V_gmem;
  int n;                    // the current key tile
  const int causal_offset;  // last key that the warp's first row sees, if causal

  __device__ __forceinline__ KeyTileWalk(const ForwardParams& params_, const QueryTile& tile, int last_tile,
                                         ptx::SmemPointer KV_smem)
      : params(params_),
        K_smem(KV_smem),
        V_smem(KV_smem + Spec::kKeyBytes),
        K_gmem(static_cast<const Element*>(params.k) + tile.batch * params.k_stride.batch +
               tile.head_kv * params.k_stride.head),
        V_gmem(static_cast<const Element*>(params.v) + tile.batch * params.v_stride.batch +
               tile.head_kv * params.v_stride.head),
        n(last_tile),
        causal_offset(tile.row + ptx::warp_index() * Spec::kWarpRows + params.seq_k - params.seq_q) {}

  __device__ __forceinline__ void fetch_key(StagedTile<Spec, Spec::kBlockN>& staged, int tile) const {
    staged.fetch(K_gmem + tile * Spec::kBlockN * params.k_stride.row, params.k_stride.row, params.head_dim,
                 params.seq_k - tile * Spec::kBlockN);
  }

  // On entry K of this tile has been stored, but not yet waited for.
  template <bool kIsMasked, bool kIsCausal>
  __device__ __forceinline__ void step(Accumulator<Spec>& accumulator, const QueryOperand<Spec>& Q) {
    const int first_key = n * Spec::kBlockN;
    float S_rmem[Spec::kMmaM][Spec::kMmaN][4];
    {
      StagedTile<Spec, Spec::kBlockN> V_staged;
      V_staged.fetch(V_gmem + first_key * params.v_stride.row, params.v_stride.row, params.head_dim,
                     params.seq_k - first_key);
      ptx::barrier_sync_block();  // K of this tile is whole; all warps are done with V of the tile before
      mma_sync::multiply_query_key<Spec>(S_rmem, Q, K_smem);
      V_staged.store(V_smem);
    }
    ptx::barrier_sync_block();  // V of this tile is whole; all warps are done with K
    if constexpr (kIsMasked) {
      mma_sync::mask_scores<Spec, kIsCausal>(S_rmem, ptx::lane_index(), params.seq_k - 1 - first_key,
                                             causal_offset - first_key);
    }
    StagedTile<Spec, Spec::kBlockN> K_staged;
    if (n > 0) fetch_key(K_staged, n - 1);
    mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, V_smem, params.scale_log2, kIsMasked);
    if (n > 0) K_staged.store(K_smem);
  }
};

template <typename Spec, bool kIsCausal>
__device__ __forceinline__ void attend(const ForwardParams& params, Accumulator<Spec>& accumulator,
                                       ptx::SmemPointer Q_smem, int warp_row) {
  const QueryTile tile = locate_query_tile<Spec::kBlockM, Spec::kHeadDim, kIsCausal, false>(params);
  const KeyTiles key_tiles = visible_key_tiles<Spec::kBlockN, kIsCausal, false>(params, tile);
  if (key_tiles.end == 0) return;
  KeyTileWalk<Spec> walk(params, tile, key_tiles.end - 1, Q_smem + Spec::kQueryBytes);
  {
    StagedTile<Spec, Spec::kBlockN> K_staged;
    walk.fetch_key(K_staged, walk.n);
    StagedTile<Spec, Spec::kBlockM> Q_staged;
    Q_staged.fetch(static_cast<const typename Spec::Element*>(params.q) + tile.batch * params.q_stride.batch +
                       tile.head_q * params.q_stride.head + tile.row * params.q_stride.row,
                   params.q_stride.row, params.head_dim, tile.rows);
    K_staged.store(walk.K_smem);
    Q_staged.store(Q_smem);
  }
  ptx::barrier_sync_block();  // Q is whole
  const QueryOperand<Spec> Q(Q_smem + warp_row * Spec::kRowBytes);
  for (; walk.n >= key_tiles.masked; --walk.n) walk.template step<true, kIsCausal>(accumulator, Q);
  for (; walk.n >= 0; --walk.n) walk.template step<false, kIsCausal>(accumulator, Q);
}

template <typename Spec, bool kIsCausal>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  const ptx::SmemPointer Q_smem = ptx::dynamic_shared_memory();  // [kBlockM, kHeadDim]
  const int warp_row = ptx::warp_index() * Spec::kWarpRows;
  Accumulator<Spec> accumulator;
  attend<Spec, kIsCausal>(params, accumulator, Q_smem, warp_row);
  const QueryTile tile = locate_query_tile<Spec::kBlockM, Spec::kHeadDim, kIsCausal, false>(params);
  mma_sync::finish_tile<Spec>(params, tile, warp_row, ptx::lane_index(), accumulator.rows, accumulator.O_rmem,
                              Q_smem + warp_row * Spec::kRowBytes);
}

}  // namespace sm75
}  // namespace attention
}  // namespace flashmoe
