// Maps a thread block to its query tile (batch, head, row block) and to the key tiles that it visits. One block per
// query tile.
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
  int rows;              // valid rows, 1 to kBlockM; kRuntime: 0 or less if there is no tile
  int split;             // which share of the key tiles, 0 to num_splits - 1
  Extent sequence_rows;  // kRuntime only
};

// Bytes of K and V that the heads of a section may have: a third of an H100's L2 cache, less than half of an A100's.
constexpr int kL2GroupBytes = 16 << 20;

// Each division before the first load costs 0.1 us, so problems whose heads all fit in one section skip them.
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

// The first slot of a sequence in a ragged grid. If no sequence can have more than a few row blocks, every sequence has
// as many slots as the longest one needs, and this is not used. Otherwise a sequence has the slots from this one to the
// next sequence's first: as many as it has row blocks, or one more. This needs no sum over the preceding sequences.
template <int kBlockM>
__device__ __forceinline__ int first_slot(const ForwardParams& params, int batch) {
  const int row = load_length(params.sequences.cu_seqlens_q + batch);
  return max(0, min(params.sequences.rows_total, row)) / kBlockM + batch;
}

// Returns the last sequence whose first slot is at most `slot`. 32-way search: each lane of the warp probes one of up
// to 32 evenly spaced candidates.
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

// For MaskKind::kRuntime. Grid: heads_q blocks per slot, times num_splits, assigned from the last slot to the first
// because with a right bound the later row blocks of a sequence take longer. The heads of a row block are adjacent, and
// so are the splits of a head. A slot past its sequence's last row block has no tile.
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
  int block;  // row block within the sequence
  if (static_cast<int64_t>(blocks_of_longest) * params.batch * params.heads_q == blocks) {
    tile.batch = blocks_of_longest == 1 ? slot : slot / blocks_of_longest;
    block = slot - tile.batch * blocks_of_longest;
  } else {
    tile.batch = sequence_of_slot<kBlockM>(params, slot);
    block = slot - first_slot<kBlockM>(params, tile.batch);
  }
  tile.sequence_rows = row_extent(params, tile.batch);
  tile.row = block * kBlockM;
  // If the first sequence does not start at the tensor's first row, `block` is negative for the slots before it.
  const bool is_skipped = tile.sequence_rows.length <= -params.num_splits;
  tile.rows = block < 0 || is_skipped ? 0 : min(kBlockM, tile.sequence_rows.length - tile.row);
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
// The same for callers that need only the rows: reads no key lengths.
template <MaskKind kMask>
__device__ __forceinline__ Sequence<kMask> rows_of(const ForwardParams& params, const QueryTile& tile) {
  if constexpr (kMask == MaskKind::kRuntime) {
    return Sequence<kMask>(params, tile.batch, tile.sequence_rows, Extent{0, 0});
  } else {
    return Sequence<kMask>(params, tile.batch);
  }
}

// The key tiles of this block. With a split, full_end is still that of the whole query tile.
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
