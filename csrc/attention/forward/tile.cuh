// Which part of the problem a thread block computes, one block per query tile: (batch, head, row block) and its key tiles.
#pragma once

#include "attention/masks.cuh"
#include "attention/params/forward.h"
#include "attention/schedule.cuh"
#include "attention/sequences.cuh"
#include "device/math.cuh"
#include "device/reduce.cuh"
#include "ptx/special_registers.cuh"
#include "ptx/types.cuh"

namespace flashmoe::attention {

struct QueryTile {
  int batch;
  int head_q;
  int head_kv;
  int row;               // first query row
  int rows;              // valid ones, 1 to kBlockM; kRuntime: 0 or less where there is no tile
  int split;             // which share of the key tiles, 0 to num_splits - 1
  Extent sequence_rows;  // of kRuntime alone
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

// Where no sequence can have more than a few row blocks, each has as many slots as the longest. Otherwise a sequence has those from this
// one on to the next sequence's, as many as it has row blocks or one more: no sum over the sequences before it is needed.
template <int kBlockM>
__device__ __forceinline__ int first_slot(const ForwardParams& params, int batch) {
  const int row = load_length(params.sequences.cu_seqlens_q + batch);
  return max(0, min(params.sequences.rows_total, row)) / kBlockM + batch;
}

// The last sequence whose slots begin at `slot` or before. Each lane of a warp asks one in 32 of what is left.
template <int kBlockM>
__device__ __forceinline__ int sequence_of_slot(const ForwardParams& params, int slot) {
  const int lane = ptx::lane_index();
  int first = 0;
  for (int count = params.batch; count > 1;) {
    const int step = ceil_div(count, 32);
    const bool is_reached = lane * step < count && first_slot<kBlockM>(params, first + lane * step) <= slot;
    const int passed = max(0, ptx::population_count(ptx::vote_ballot(is_reached)) - 1) * step;
    first += passed;
    count = min(step, count - passed);
  }
  return first;
}

// Of MaskKind::kRuntime. Grid: heads_q blocks for every slot, which are taken from the last one on: with a right bound the later row blocks of
// a sequence are longer. The heads of a row block are neighbours, and the splits of a head's. A slot past its sequence's last row block has no
// tile.
template <int kBlockM, bool kIsSplit>
__device__ __forceinline__ QueryTile locate_varlen_tile(const ForwardParams& params) {
  const int blocks = kIsSplit ? ptx::grid_size() / params.num_splits : ptx::grid_size();
  const int index = kIsSplit ? ptx::block_index() / params.num_splits : ptx::block_index();
  const int number = blocks - 1 - index;
  const int slot = number / params.heads_q;
  const int head = params.heads_q - 1 - (number - slot * params.heads_q);
  QueryTile tile{0, head, head, 0, 0, kIsSplit ? ptx::block_index() - index * params.num_splits : 0, {0, 0}};
  if (params.heads_q != params.heads_kv) tile.head_kv = head / heads_per_key_head(params);
  const int blocks_of_longest = ceil_div(params.seq_q, kBlockM);
  int block;  // of the sequence
  if (static_cast<int64_t>(blocks_of_longest) * params.batch * params.heads_q == blocks) {
    tile.batch = blocks_of_longest == 1 ? slot : slot / blocks_of_longest;
    block = slot - tile.batch * blocks_of_longest;
  } else {
    tile.batch = sequence_of_slot<kBlockM>(params, slot);
    block = slot - first_slot<kBlockM>(params, tile.batch);
  }
  tile.sequence_rows = row_extent(params, tile.batch);
  tile.row = block * kBlockM;
  // Slots before the first sequence's, where its rows are not the tensor's first, count backwards.
  const bool is_another_kernel_s = tile.sequence_rows.length <= -params.num_splits;
  tile.rows = block < 0 || is_another_kernel_s ? 0 : min(kBlockM, tile.sequence_rows.length - tile.row);
  return tile;
}

// Grid: ceil(seq_q / kBlockM) * heads_q * batch * num_splits blocks; the splits of a tile are neighbours.
template <int kBlockM, int kHeadDim, MaskKind kMask, bool kIsSplit>
__device__ __forceinline__ QueryTile locate_query_tile(const ForwardParams& params) {
  if constexpr (kMask == MaskKind::kRuntime) return locate_varlen_tile<kBlockM, kIsSplit>(params);
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

template <MaskKind kMask>
__device__ __forceinline__ Sequence<kMask> sequence_of(const ForwardParams& params, const QueryTile& tile) {
  if constexpr (kMask == MaskKind::kRuntime) {
    return Sequence<kMask>(params, tile.batch, tile.sequence_rows, key_extent(params, tile.batch));
  } else {
    return Sequence<kMask>(params, tile.batch);
  }
}
// The same for what asks for its rows alone: no length of keys is read.
template <MaskKind kMask>
__device__ __forceinline__ Sequence<kMask> rows_of(const ForwardParams& params, const QueryTile& tile) {
  if constexpr (kMask == MaskKind::kRuntime) {
    return Sequence<kMask>(params, tile.batch, tile.sequence_rows, Extent{0, 0});
  } else {
    return Sequence<kMask>(params, tile.batch);
  }
}

// The block's key tiles. With a split, full_end is the whole query tile's.
template <int kBlockN, MaskKind kMask, bool kIsSplit>
__device__ __forceinline__ KeyTiles key_tiles_of(const Sequence<kMask>& sequence, const QueryTile& tile) {
  KeyTiles tiles = Mask<kMask>(sequence).template key_tiles<kBlockN>(tile.row, tile.rows);
  if constexpr (kIsSplit) {
    const int all = kMask == MaskKind::kRuntime ? tiles.end - tiles.begin : ceil_div(sequence.keys(), kBlockN);
    const int share = ceil_div(all, sequence.params.num_splits);
    tiles.begin = min(tiles.begin + tile.split * share, tiles.end);
    tiles.end = min(tiles.begin + share, tiles.end);
  }
  return tiles;
}

}  // namespace flashmoe::attention
