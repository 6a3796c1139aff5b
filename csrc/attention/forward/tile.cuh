// Which part of the problem a thread block computes, one block a query tile: (batch, head, row block) and its key tiles.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe {
namespace attention {

struct QueryTile {
  int batch;
  int head_q;
  int head_kv;
  int row;    // first query row
  int rows;   // valid ones, 1 to kBlockM
  int split;  // which share of the key tiles, 0 to num_splits - 1
};

// K and V of a section's heads: a third of an H100's second-level cache, and less than half of an A100's.
constexpr int kL2GroupBytes = 16 << 20;

// Divisions before the first load cost 0.1 us each, so small problems, where all heads fit, do without these.
template <int kHeadDim, MaskKind kMask>
__device__ __forceinline__ Section section_of_tile(const ForwardParams& params, int m_blocks, int index) {
  Section section{index, 0, 0};
  if constexpr (kMask == MaskKind::kCausal) {
    const int heads = params.batch * params.heads_q;
    const int heads_kv = params.batch * params.heads_kv;
    constexpr int kFittingKeys = kL2GroupBytes / (2 * 2 * kHeadDim);
    section.heads = heads;
    if (heads_kv > 1 && static_cast<int64_t>(heads_kv) * params.seq_k > kFittingKeys) {
      const int fitting = max(1, kFittingKeys / params.seq_k) * heads_per_key_head(params);
      section.first_head = index / (fitting * m_blocks) * fitting;
      section.index -= section.first_head * m_blocks;
      section.heads = min(fitting, heads - section.first_head);
    }
  }
  return section;
}

// Grid: ceil(seq_q / kBlockM) * heads_q * batch * num_splits blocks; the splits of a tile are neighbours.
template <int kBlockM, int kHeadDim, MaskKind kMask, bool kIsSplit>
__device__ __forceinline__ QueryTile locate_query_tile(const ForwardParams& params) {
  QueryTile tile;
  int index = ptx::block_index();
  tile.split = 0;
  if constexpr (kIsSplit) {
    tile.split = index % params.num_splits;
    index /= params.num_splits;
  }
  const int m_blocks = ceil_div(params.seq_q, kBlockM);
  ScheduledTile scheduled{0, index};
  if (m_blocks > 1) {
    scheduled = schedule_tile<kMask>(section_of_tile<kHeadDim, kMask>(params, m_blocks, index), m_blocks);
  }
  tile.batch = params.batch == 1 ? 0 : scheduled.head / params.heads_q;
  tile.head_q = scheduled.head - tile.batch * params.heads_q;
  tile.head_kv = params.heads_q == params.heads_kv ? tile.head_q : tile.head_q / heads_per_key_head(params);
  tile.row = scheduled.m_block * kBlockM;
  tile.rows = min(kBlockM, params.seq_q - tile.row);
  return tile;
}

// The block's key tiles. With a split, full_end is the whole query tile's.
template <int kBlockN, MaskKind kMask, bool kIsSplit>
__device__ __forceinline__ KeyTiles key_tiles_of(const ForwardParams& params, const QueryTile& tile) {
  const Sequence<kMask> sequence(params, tile.batch);
  KeyTiles tiles = Mask<kMask>(sequence).template key_tiles<kBlockN>(tile.row, tile.rows);
  if constexpr (kIsSplit) {
    const int share = ceil_div(ceil_div(sequence.keys(), kBlockN), params.num_splits);
    tiles.begin = min(tile.split * share, tiles.end);
    tiles.end = min(tiles.begin + share, tiles.end);
  }
  return tiles;
}

}  // namespace attention
}  // namespace flashmoe
