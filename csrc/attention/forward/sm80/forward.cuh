// Flash attention forward with mma.sync and cp.async: sm_80 and every later GPU.
//
// One thread block computes kBlockM query rows of one head. A warp owns kWarpRows of them, or kWarpColumns columns of
// these, and exchanges scores only with the warps that share its rows (terms.cuh). Key tiles are walked from the first
// visible one to the last (attention/softmax.cuh).
#pragma once

#include "attention/forward/mma_sync/accumulate.cuh"
#include "attention/forward/mma_sync/epilogue.cuh"
#include "attention/forward/mma_sync/multiply.cuh"
#include "attention/forward/sm80/load.cuh"
#include "attention/forward/sm80/spec.cuh"
#include "attention/forward/sm80/terms.cuh"
#include "attention/forward/tile.cuh"
#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/sequences.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/memory.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe::attention::sm80 {

using mma_sync::Accumulator;
template <typename Spec>
using QueryOperand = mma_sync::QueryOperand<Spec, Spec::kWarpColumns>;

// Which of a loop's tiles need a mask. kSome: decided per tile and warp.
enum class Masked { kNone, kSome, kAll };

// What MaskKind::kRuntime needs and the other masks do not.
template <typename Spec, MaskKind kMask>
struct VarlenWalk {
  __device__ __forceinline__ VarlenWalk(const Sequence<kMask>&, const QueryTile&) {}
};
template <typename Spec>
struct VarlenWalk<Spec, MaskKind::kRuntime> {
  using Element = typename Spec::Element;

  const Element* K_gmem;  // of the head's first key, or page
  const Element* V_gmem;
  const KeyRange visible;  // keys that some row of the tile sees
  const int head_q;
  const int warp_row;  // the warp's first row in the sequence
  const mma_sync::WalkDropout<Spec> dropout;

  __device__ __forceinline__ VarlenWalk(const Sequence<MaskKind::kRuntime>& sequence, const QueryTile& tile)
      : K_gmem(static_cast<const Element*>(sequence.params.k) +
               sequence.key_offset(sequence.params.k_stride, tile.head_kv)),
        V_gmem(static_cast<const Element*>(sequence.params.v) +
               sequence.key_offset(sequence.params.v_stride, tile.head_kv)),
        visible(Mask<MaskKind::kRuntime>(sequence).keys(tile.row, tile.rows)),
        head_q(tile.head_q),
        warp_row(tile.row + Spec::warp_row()),
        dropout(sequence.params, tile) {}
};

// What the epilogue needs of a kRuntime tile, one copy per warp in shared memory. Locating the tile again would cost
// short sequences 3% of their time, and the loop has no registers to keep it in.
template <typename Spec>
struct SavedTile {
  const ptx::SmemPointer smem;

  __device__ __forceinline__ explicit SavedTile(ptx::SmemPointer block_smem)
      : smem(block_smem + Spec::kTileOffset + ptx::recompute(ptx::warp_index()) * Spec::kTileBytes) {}

  __device__ __forceinline__ void store(const QueryTile& tile) const {
    if (ptx::lane_index() == 0) {
      const int words[4] = {tile.batch, tile.head_q, tile.row, tile.rows};
      ptx::st_shared_128(smem, reinterpret_cast<const uint32_t (&)[4]>(words));
      ptx::st_shared_32(smem + 16, static_cast<uint32_t>(tile.sequence_rows.first));
      if constexpr (Spec::kIsSplit) ptx::st_shared_32(smem + 20, static_cast<uint32_t>(tile.split));
    }
    ptx::warp_sync();  // read after write
  }
  __device__ __forceinline__ QueryTile load() const {
    uint32_t words[4];
    ptx::ld_shared_128(words, smem);
    const int first = static_cast<int>(ptx::ld_shared_32(smem + 16));
    return QueryTile{static_cast<int>(words[0]),
                     static_cast<int>(words[1]),
                     0,
                     static_cast<int>(words[2]),
                     static_cast<int>(words[3]),
                     Spec::kIsSplit ? static_cast<int>(ptx::ld_shared_32(smem + 20)) : 0,
                     {first, 0}};
  }
};

// The walk of one query tile over its key tiles: shared memory, the two loaders, and the position in the ring.
// kIsPlain: kRuntime without pages and score functions, which is as fast as a dense kernel's walk.
template <typename Spec, MaskKind kMask, bool kIsPlain>
struct KeyTileWalk {
  static constexpr int kStages = Spec::kNumStages;
  static constexpr bool kReadsByKey = kMask == MaskKind::kRuntime && !kIsPlain;  // and checks whether each is visible

  using Element = typename Spec::Element;

  const ForwardParams& params;
  const Sequence<kMask> sequence;
  const ptx::SmemPointer KV_smem;  // [kStages] of K [kBlockN, kHeadDim], then [kStages] of V
  TileLoader<Spec> K_loader;
  TileLoader<Spec> V_loader;
  int n;            // the current key tile
  const int end;    // after the last one
  int stage;        // stage of the current tile
  int causal_last;  // last key that the warp's first row sees, if causal; kRuntime: the window's key (masks.cuh)
  const VarlenWalk<Spec, kMask> varlen;

  __device__ __forceinline__ KeyTileWalk(const Sequence<kMask>& sequence_, const QueryTile& tile,
                                         const KeyTiles& key_tiles, ptx::SmemPointer KV_smem_)
      : params(sequence_.params),
        sequence(sequence_),
        KV_smem(KV_smem_),
        K_loader(static_cast<const Element*>(params.k) + sequence.key_offset(params.k_stride, tile.head_kv),
                 params.k_stride.row, key_tiles.begin * Spec::kBlockN),
        V_loader(static_cast<const Element*>(params.v) + sequence.key_offset(params.v_stride, tile.head_kv),
                 params.v_stride.row, key_tiles.begin * Spec::kBlockN),
        n(key_tiles.begin),
        end(key_tiles.end),
        stage(0),
        causal_last(Mask<kMask>(sequence).last_key(tile.row + Spec::warp_row())),
        varlen(sequence, tile) {}

  // kIsWhole promises that no row of the tile is past the last key. Only the last tile can have such rows.
  template <bool kIsWhole = kReadsByKey>
  __device__ __forceinline__ void load_key(int tile, int to_stage) {
    if constexpr (!kIsWhole) {
      if ((tile + 1) * Spec::kBlockN <= end_of_keys()) return load_key<true>(tile, to_stage);
    }
    if constexpr (kMask == MaskKind::kRuntime && kIsPlain) {
      const int first_key = tile * Spec::kBlockN;
      K_loader.template load_between<Spec::kBlockN, kIsWhole>(KV_smem + to_stage * Spec::kKeyBytes, params.k_stride.row,
                                                              params.head_dim, varlen.visible.begin - first_key,
                                                              varlen.visible.end - first_key);
      return;
    } else if constexpr (kMask == MaskKind::kRuntime) {
      load_varlen_tile<Spec, Spec::kBlockN>(KV_smem + to_stage * Spec::kKeyBytes, varlen.K_gmem, params.k_stride,
                                            params.head_dim, sequence, tile * Spec::kBlockN, varlen.visible);
      return;
    }
    K_loader.template load<Spec::kBlockN, kIsWhole>(KV_smem + to_stage * Spec::kKeyBytes, params.k_stride.row,
                                                    params.head_dim, sequence.keys() - tile * Spec::kBlockN);
  }

  template <bool kIsWhole = kReadsByKey>
  __device__ __forceinline__ void load_value(int tile, int to_stage) {
    if constexpr (!kIsWhole) {
      if ((tile + 1) * Spec::kBlockN <= end_of_keys()) return load_value<true>(tile, to_stage);
    }
    if constexpr (kMask == MaskKind::kRuntime && kIsPlain) {
      const int first_key = tile * Spec::kBlockN;
      V_loader.template load_between<Spec::kBlockN, kIsWhole>(
          KV_smem + (kStages + to_stage) * Spec::kKeyBytes, params.v_stride.row, params.head_dim_v,
          varlen.visible.begin - first_key, varlen.visible.end - first_key);
      return;
    } else if constexpr (kMask == MaskKind::kRuntime) {
      load_varlen_tile<Spec, Spec::kBlockN>(KV_smem + (kStages + to_stage) * Spec::kKeyBytes, varlen.V_gmem,
                                            params.v_stride, params.head_dim_v, sequence, tile * Spec::kBlockN,
                                            varlen.visible);
      return;
    }
    V_loader.template load<Spec::kBlockN, kIsWhole>(KV_smem + (kStages + to_stage) * Spec::kKeyBytes,
                                                    params.v_stride.row, params.head_dim,
                                                    sequence.keys() - tile * Spec::kBlockN);
  }

  // Starts the load of the first K tile, or, with a ring, the loads of the first kStages - 1 tiles.
  __device__ __forceinline__ void start() {
    if constexpr (kStages == 1) {
      load_key(n, 0);
      ptx::cp_async_commit();
    } else {
#pragma unroll
      for (int ahead = 0; ahead < kStages - 1; ++ahead) {
        if (n + ahead < end) {
          load_key(n + ahead, ahead);
          load_value(n + ahead, ahead);
        }
        ptx::cp_async_commit();
      }
    }
  }

  // S = Q K^T of the current tile; starts every load that may start by then. On return V of the tile is complete in
  // shared memory; returns its address.
  template <Masked kMasked>
  __device__ __forceinline__ ptx::SmemPointer scores(float (&S_rmem)[Spec::kMmaM][Spec::kMmaN][4],
                                                     const QueryOperand<Spec>& Q) {
    const ptx::SmemPointer K_smem = KV_smem + stage * Spec::kKeyBytes + Spec::column_bytes();
    const ScoreTerms<Spec> terms(KV_smem + (Spec::kTermOffset - Spec::kQueryBytes));
    if constexpr (kStages == 1) {
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // K of this tile is complete; all warps are done with V of the previous tile
      load_value<kMasked == Masked::kNone || kReadsByKey>(n, 0);
      ptx::cp_async_commit();
      mma_sync::multiply_query_key<Spec, Spec::kWarpColumns>(S_rmem, Q, K_smem);
      terms.publish(S_rmem);
      ptx::cp_async_wait<0>();
      ptx::barrier_sync_block();  // V of this tile and the terms of the scores are complete; all warps are done with K
      terms.add(S_rmem);
      if (n + 1 < end) load_key(n + 1, 0);
      ptx::cp_async_commit();
    } else {
      ptx::cp_async_wait<kStages - 2>();
      ptx::barrier_sync_block();  // tile is complete; all warps are done with the last one, whose buffers are refilled
      const int next = n + kStages - 1;
      if (next < end) {
        const int next_stage = stage == 0 ? kStages - 1 : stage - 1;
        load_key(next, next_stage);
        load_value(next, next_stage);
      }
      ptx::cp_async_commit();
      stage = stage == kStages - 1 ? 0 : stage + 1;
      mma_sync::multiply_query_key<Spec, Spec::kWarpColumns>(S_rmem, Q, K_smem);
      terms.publish(S_rmem);
      terms.sync();
      terms.add(S_rmem);
    }
    return K_smem + kStages * Spec::kKeyBytes;
  }

  // Keys from here on are not read.
  __device__ __forceinline__ int end_of_keys() const {
    if constexpr (kMask == MaskKind::kRuntime) return varlen.visible.end;
    return sequence.keys();
  }

  template <Masked kMasked>
  __device__ __forceinline__ void step(Accumulator<Spec>& accumulator, const QueryOperand<Spec>& Q) {
    float S_rmem[Spec::kMmaM][Spec::kMmaN][4];
    const ptx::SmemPointer V_smem = scores<kMasked>(S_rmem, Q);
    const int first_key = n * Spec::kBlockN;
    const TileMask<kMask> mask = tile_mask<kMask>(sequence, causal_last, first_key);
    // Each warp checks its own limit, which saves the register that would hold the first masked tile.
    bool is_masked = kMasked == Masked::kAll ||
                     (kMasked == Masked::kSome && mask.template hides_some<Spec::kBlockN>(Spec::kWarpRows));
    if constexpr (kMask == MaskKind::kRuntime && !kIsPlain) {
      mma_sync::shape_scores<Spec>(S_rmem, sequence, varlen.head_q, varlen.warp_row, first_key);
    }
    if (is_masked) mma_sync::mask_scores<Spec>(S_rmem, ptx::lane_index(), mask);
    // A mask tensor can hide any score.
    if constexpr (kMask == MaskKind::kRuntime && !kIsPlain) is_masked = true;
    if constexpr (Spec::kHasDropout) {
      mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, V_smem, params.scale_log2, is_masked, varlen.dropout,
                                      varlen.warp_row, first_key);
    } else {
      mma_sync::accumulate_tile<Spec>(accumulator, S_rmem, V_smem, params.scale_log2, is_masked);
    }
  }
};

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ QueryTile this_query_tile(const ForwardParams& params) {
  return locate_query_tile<Spec::kBlockM, Spec::kHeadDim, kMask, Spec::kIsSplit>(params);
}

// The same after the loop.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ QueryTile end_tile(const ForwardParams& params, ptx::SmemPointer block_smem) {
  if constexpr (kMask == MaskKind::kRuntime) return SavedTile<Spec>(block_smem).load();
  return this_query_tile<Spec, kMask>(params);
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void load_query(const Sequence<kMask>& sequence, const QueryTile& tile,
                                           ptx::SmemPointer Q_smem) {
  const ForwardParams& params = sequence.params;
  TileLoader<Spec> loader(
      static_cast<const typename Spec::Element*>(params.q) + sequence.row_offset(params.q_stride, tile.head_q),
      params.q_stride.row, tile.row);
  loader.template load<Spec::kBlockM, false>(Q_smem, params.q_stride.row, params.head_dim, tile.rows);
}

template <typename Spec, MaskKind kMask, bool kIsPlain>
__device__ __forceinline__ void run_mainloop(const Sequence<kMask>& sequence, Accumulator<Spec>& accumulator,
                                             const QueryTile& tile, const KeyTiles& key_tiles, ptx::SmemPointer Q_smem,
                                             int warp_row) {
  KeyTileWalk<Spec, kMask, kIsPlain> walk(sequence, tile, key_tiles, Q_smem + Spec::kQueryBytes);
  walk.start();
  if constexpr (Spec::kQueryInRegisters) {
    ptx::cp_async_wait<Spec::kNumStages == 1 ? 0 : Spec::kNumStages - 2>();
    ptx::barrier_sync_block();  // Q is complete
  }
  const QueryOperand<Spec> Q(Q_smem + warp_row * Spec::kRowBytes + Spec::column_bytes());
  if constexpr (kMask == MaskKind::kRuntime && kIsPlain && Spec::kHasMaskedLoop) {
    // Full tiles have their own inner loop; the tiles that need a mask are on both sides of them.
    for (; walk.n < key_tiles.end; ++walk.n) {
      for (; walk.n >= key_tiles.full_begin && walk.n < key_tiles.full_end; ++walk.n) {
        walk.template step<Masked::kNone>(accumulator, Q);
      }
      if (walk.n >= key_tiles.end) break;
      walk.template step<Masked::kSome>(accumulator, Q);
    }
  } else if constexpr (kMask != MaskKind::kRuntime && Spec::kHasMaskedLoop) {
    for (; walk.n < key_tiles.full_end; ++walk.n) walk.template step<Masked::kNone>(accumulator, Q);
    for (; walk.n < key_tiles.end; ++walk.n) walk.template step<Masked::kAll>(accumulator, Q);
  } else {
    for (; walk.n < key_tiles.end; ++walk.n) walk.template step<Masked::kSome>(accumulator, Q);
  }
  ptx::cp_async_wait<0>();
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void attend(const ForwardParams& params, Accumulator<Spec>& accumulator,
                                       ptx::SmemPointer Q_smem, int warp_row) {
  const QueryTile tile = this_query_tile<Spec, kMask>(params);
  // Before the branch, so that its loads overlap those of the tile.
  const Sequence<kMask> sequence = sequence_of<kMask>(params, tile);
  if constexpr (kMask == MaskKind::kRuntime) SavedTile<Spec>(Q_smem).store(tile);
  if (kMask == MaskKind::kRuntime && tile.rows <= 0) return;
  const KeyTiles key_tiles = key_tiles_of<Spec::kBlockN, kMask, Spec::kIsSplit>(sequence, tile);
  if (key_tiles.begin >= key_tiles.end) return;
  load_query<Spec, kMask>(sequence, tile, Q_smem);
  if constexpr (kMask == MaskKind::kRuntime) {
    if (Spec::kHasAlibi || Spec::kHasDropout || params.sequences.block_table != nullptr ||
        params.score_options.score_factor > 0.0f || params.score_options.mask != nullptr) {
      run_mainloop<Spec, kMask, false>(sequence, accumulator, tile, key_tiles, Q_smem, warp_row);
      return;
    }
  }
  run_mainloop<Spec, kMask, true>(sequence, accumulator, tile, key_tiles, Q_smem, warp_row);
}

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ void forward(const ForwardParams& params) {
  const ptx::SmemPointer Q_smem = ptx::dynamic_shared_memory();  // [kBlockM, kHeadDim]
  const int warp_row = Spec::warp_row();
  Accumulator<Spec> accumulator;
  attend<Spec, kMask>(params, accumulator, Q_smem, warp_row);
  // Located again or read back: this saves five registers in the loop, which has none to spare.
  const QueryTile tile = end_tile<Spec, kMask>(params, Q_smem);
  if (kMask == MaskKind::kRuntime && tile.rows <= 0) return;
  mma_sync::finish_tile<Spec, kMask>(params, tile, warp_row, ptx::lane_index(), accumulator.rows, accumulator.O_rmem,
                                     Q_smem + warp_row * Spec::kRowBytes + Spec::column_bytes(),
                                     Spec::kColumnWarps == 1 ? 0 : Spec::column_part() * Spec::kWarpColumns);
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

}  // namespace flashmoe::attention::sm80
