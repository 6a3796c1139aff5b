// Which part of the problem a thread block computes, one block a query tile: (batch, head, row block) and its key tiles.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe {
namespace attention {

struct QueryTile {
  int batch;
  int head_q;
  int head_kv;
  int row;    // first query row
  int rows;   // valid ones, 1 to kBlockM; of a band 0 where there is no tile
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

// Of bands. Grid: heads_q for every row block that the batch may have, by what the host knows: of those blocks the first ones find
// none (rows 0). Row blocks are numbered entry by entry, and taken from the last one on: with a right bound the later ones of an entry
// are longer. The heads of a row block are neighbours.
template <int kBlockM>
__device__ __forceinline__ QueryTile locate_band_tile(const ForwardParams& params) {
  const int row_blocks = ptx::grid_size() / params.heads_q;
  const int index = ptx::block_index() / params.heads_q;
  QueryTile tile{0, ptx::block_index() - index * params.heads_q, 0, 0, 0, 0};
  tile.head_kv = tile.head_q / (params.heads_q / params.heads_kv);
  int block = row_blocks - 1 - index;  // of those of the entries from `group` on
  if (params.entries.cu_seqlens_q == nullptr) {
    const int blocks_of_entry = ceil_div(params.seq_q, kBlockM);
    tile.batch = block / blocks_of_entry;
    tile.row = (block - tile.batch * blocks_of_entry) * kBlockM;
    tile.rows = min(kBlockM, params.seq_q - tile.row);
    return tile;
  }
  const int lane = ptx::lane_index();
  for (int group = 0; group < params.batch; group += 32) {
    const int rows = group + lane < params.batch ? row_extent(params, group + lane).length : 0;
    const int blocks = ceil_div(rows, kBlockM);
    const int behind = warp_prefix_sum(blocks);
    const uint32_t reached = ptx::vote_ballot(behind > block);
    if (reached == 0) {
      block -= ptx::shuffle_index(behind, 31);
      continue;
    }
    const int found = ptx::population_count(~reached & (reached - 1));  // the first lane that reaches past it
    tile.batch = group + found;
    tile.row = (block - ptx::shuffle_index(behind - blocks, found)) * kBlockM;
    tile.rows = min(kBlockM, ptx::shuffle_index(rows, found) - tile.row);
    return tile;
  }
  return tile;
}

// Grid: ceil(seq_q / kBlockM) * heads_q * batch * num_splits blocks; the splits of a tile are neighbours.
template <int kBlockM, int kHeadDim, MaskKind kMask, bool kIsSplit>
__device__ __forceinline__ QueryTile locate_query_tile(const ForwardParams& params) {
  if constexpr (kMask == MaskKind::kBand) return locate_band_tile<kBlockM>(params);
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
