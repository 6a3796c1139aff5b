// Which rows a thread block owns, and which blocks of the stream they see. One block of threads a tile.
#pragma once

#include "attention/forward/tile.cuh"
#include "attention/masks.cuh"
#include "attention/params/backward.h"
#include "attention/schedule.cuh"
#include "device/math.cuh"
#include "ptx/special_registers.cuh"

namespace flashmoe {
namespace attention {
namespace backward {
namespace mma_sync {

// Rows `row` to row + kOwnRows - 1 of a head: a query head in the kernel of dq, a key head in that of dk and dv.
struct OwnTile {
  int batch;
  int head;
  int row;
};

// Of every batch entry, for the mask rule.
struct Lengths {
  const BackwardParams& params;

  __device__ __forceinline__ int rows() const { return params.seq_q; }
  __device__ __forceinline__ int keys() const { return params.seq_k; }
};

// Leading keys that query `row` sees.
template <MaskKind kMask>
__device__ __forceinline__ int visible_keys(const BackwardParams& params, int row) {
  if constexpr (kMask == MaskKind::kFull) return params.seq_k;
  return max(0, min(params.seq_k, diagonal_key(Lengths{params}, row + 1)));
}

// The first query that sees key `key`. The last query sees every key.
template <MaskKind kMask>
__device__ __forceinline__ int first_query(const BackwardParams& params, int key) {
  if constexpr (kMask == MaskKind::kFull) return 0;
  return max(0, diagonal_row(Lengths{params}, key));
}

__device__ __forceinline__ int heads_per_key_head(const BackwardParams& params) {
  return params.heads_q / params.heads_kv;
}

// Grid: ceil(own rows / kOwnRows) * own heads * batch blocks. Causal: in sections of heads whose streams fit the second-level
// cache, the tiles with the longest streams first; those are the last rows, or the first keys.
template <typename Spec, MaskKind kMask>
__device__ __forceinline__ OwnTile locate_tile(const BackwardParams& params) {
  const int group = heads_per_key_head(params);
  const int heads = Spec::kStreamsQueries ? params.heads_kv : params.heads_q;
  const int tiles = ceil_div(Spec::kStreamsQueries ? params.seq_k : params.seq_q, Spec::kOwnRows);
  Section section{ptx::block_index(), 0, 0};
  if constexpr (kMask == MaskKind::kCausal) {
    constexpr int kFittingRows = kL2GroupBytes / (2 * Spec::kRowBytes);
    const int all_heads = params.batch * heads;
    const int fitting = Spec::kStreamsQueries ? max(1, kFittingRows / params.seq_q / group)
                                              : max(1, kFittingRows / params.seq_k) * group;
    const int section_heads = min(all_heads, fitting);
    section.first_head = section.index / (section_heads * tiles) * section_heads;
    section.index -= section.first_head * tiles;
    section.heads = min(section_heads, all_heads - section.first_head);
  }
  const ScheduledTile scheduled = schedule_tile<kMask>(section, tiles);
  const int index =
      kMask == MaskKind::kCausal && Spec::kStreamsQueries ? tiles - 1 - scheduled.m_block : scheduled.m_block;
  const int batch = scheduled.head / heads;
  return OwnTile{batch, scheduled.head - batch * heads, index * Spec::kOwnRows};
}

// Blocks of the stream [begin, end) that some row of a tile sees, for each of the heads [head, end_head).
struct StreamRange {
  int begin;
  int end;
  int head;
  int end_head;
};

template <typename Spec, MaskKind kMask>
__device__ __forceinline__ StreamRange stream_range(const BackwardParams& params, const OwnTile& tile) {
  const int group = heads_per_key_head(params);
  if constexpr (Spec::kStreamsQueries) {
    return StreamRange{first_query<kMask>(params, tile.row) / Spec::kStreamRows,
                       ceil_div(params.seq_q, Spec::kStreamRows), tile.head * group, (tile.head + 1) * group};
  } else {
    const int last_row = min(tile.row + Spec::kOwnRows, params.seq_q) - 1;
    const int key_head = tile.head / group;
    return StreamRange{0, ceil_div(visible_keys<kMask>(params, last_row), Spec::kStreamRows), key_head, key_head + 1};
  }
}

}  // namespace mma_sync
}  // namespace backward
}  // namespace attention
}  // namespace flashmoe
